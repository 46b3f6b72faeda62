// Sums of squares for the L2 norm, in double and in one fixed order: the same bits for any number of threads,
// instruction set and device, and whether the values come in one piece or block by block.
//
// [Note: order of a sum of squares]
//   1. A segment is cut into chunks of kNormChunkNumel elements from its first element.
//   2. Element i of a chunk adds its square to lane i % kNormLanes, in ascending i (1,024 lanes: 256 CUDA threads of 4)
//   3. The lanes of a chunk are added as fold_lanes() says: fours, then halves within 32 fours, then warps in order.
//   4. The chunks of a segment are added as fold() in norm_fold.h says: by groups of 64, each in ascending order, and
//      the groups in ascending order. So are the segments, where a total is wanted.
// The squares of 16- and 32-bit floats are exact in double and no sum of them overflows. So a sum is infinite or NaN
// if and only if some element is, which costs nothing to check. The square of a float64 is rounded to double before it
// is added; it, or a sum, may overflow to infinity, which counts as bad too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "kernels/cpu_kernels.h"
#include "kernels/norm_fold.h"

namespace bucketwheel {

inline constexpr int64_t kNormChunkNumel = 32768;

struct SumSquares {
  double sumsq = 0.0;
  bool bad = false;  // some element is infinite or NaN, or the sum of float64 squares has overflowed
};

// Elements of one tensor, or of a piece of one, contiguous.
struct NormRow {
  const void* data = nullptr;
  int64_t numel = 0;
  DType dtype = DType::kFloat32;  // kFloat32, kBFloat16, kFloat16 or kFloat64
};

// One result for each row.
std::vector<SumSquares> sumsq(std::span<const NormRow> rows);

// Step 3 of the note, where only the first `used` lanes were added to (the others add nothing, and are not read).
double fold_lanes(const double* lanes, int64_t used);

// The same for one segment whose values come block by block, in ascending order; blocks may have any size.
class SumsqAccumulator {
 public:
  void reset();
  void consume(const float* values, int64_t numel);
  // to[i] = values[i], or to[i] += values[i] if `add`; adds up the squares of the stored values while they are in
  // cache. Types as in ShardAccumulator.
  void store(void* to, DType dtype, const void* values, int64_t numel, bool add);
  SumSquares result() const;  // of the values so far

 private:
  template <class Take>
  void by_chunk(int64_t numel, Take&& take);
  int64_t used_lanes() const { return in_chunk_ < kNormLanes ? in_chunk_ : kNormLanes; }
  void close_chunk();

  Fold sum_;              // of the complete chunks
  int64_t in_chunk_ = 0;  // elements of the chunk in progress
  alignas(64) double lanes_[kNormLanes] = {};
};

// Receives a reduced gradient shard block by block. In one pass it stores each block, or adds it to the shard, and
// adds up the squares of each segment. Padding outside of the segments is stored, but not summed. The results have the
// bits of sumsq() over the segments of the finished shard. Not thread-safe.
//
// The values are doubles for a float64 shard, else floats. A bfloat16 shard is computed in float and rounded to
// nearest even at each pass.
class ShardAccumulator {
 public:
  struct Segment {
    int64_t begin;  // elements of the shard
    int64_t end;
  };
  // `shard` holds `numel` elements of `dtype`. TypeError for another dtype than kFloat32, kBFloat16 and kFloat64,
  // ValueError unless the segments lie within the shard, ascending and disjoint.
  ShardAccumulator(void* shard, DType dtype, int64_t numel, std::vector<Segment> segments);

  // Starts a pass; `add`: to accumulate.
  void start(bool add);
  // The values of elements [begin, begin + numel). ValueError unless begin is where the last block of the pass ended.
  void consume(int64_t begin, const void* values, int64_t numel);
  // By segment, over the blocks of this pass; complete after the last one.
  const std::vector<SumSquares>& results() const { return results_; }
  int64_t position() const { return position_; }  // elements consumed in this pass
  DType dtype() const { return dtype_; }

 private:
  std::byte* shard_;
  DType dtype_;
  int64_t numel_;
  bool goes_past_cache_;  // large, so what is stored and not added goes there past the cache
  std::vector<Segment> segments_;
  std::vector<SumSquares> results_;
  bool add_ = false;
  int64_t position_ = 0;
  size_t segment_ = 0;  // the first one that is not complete
  SumsqAccumulator sums_;
};

// TypeError for a dtype that a gradient shard cannot have.
void expect_shard_dtype(DType dtype);
// Whether sums of buckets of dtype `bucket` can go into a shard of dtype `shard`. float64 goes with float64 only.
inline bool shard_takes(DType shard, DType bucket) {
  return is_float(bucket) && (shard == DType::kFloat64) == (bucket == DType::kFloat64);
}
// The type of the values for a shard of dtype `shard`.
inline DType shard_sum_dtype(DType shard) { return shard == DType::kFloat64 ? shard : DType::kFloat32; }

// ValueError unless the segments lie within a shard of `numel` elements, ascending and disjoint.
void expect_shard_segments(std::span<const ShardAccumulator::Segment> segments, int64_t numel);

}  // namespace bucketwheel
