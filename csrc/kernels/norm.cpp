#include "kernels/norm.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/segment_table.h"

namespace bucketwheel {
namespace {

static_assert(kNormChunkNumel % kNormLanes == 0, "a chunk ends with a full row of lanes");

constexpr int64_t kWarpThreads = 32;
constexpr int64_t kWarpLanes = 4 * kWarpThreads;
static_assert(kNormLanes % kWarpLanes == 0, "lanes are whole warps");

// fold_lanes() reads whole warps.
constexpr int64_t round_to_warp(int64_t lanes) { return (lanes + kWarpLanes - 1) / kWarpLanes * kWarpLanes; }

constexpr int64_t kNormGrainNumel = 65536;  // about 20 us of work

bool is_finite(double value) {
  constexpr uint64_t kExponent = 0x7ff0000000000000;
  return (std::bit_cast<uint64_t>(value) & kExponent) != kExponent;
}

SumSquares with_nonfinite_flag(double sum) { return {sum, !is_finite(sum)}; }

double chunk_sumsq(const CpuKernels& kernels, const NormRow& row, int64_t begin, int64_t numel) {
  const int64_t used = std::min(numel, kNormLanes);
  alignas(64) double lanes[kNormLanes];
  std::fill_n(lanes, round_to_warp(used), 0.0);
  const std::byte* x = static_cast<const std::byte*>(row.data) + begin * static_cast<int64_t>(size_of(row.dtype));
  kernels.sumsq(x, row.dtype, numel, 0, lanes);
  return fold_lanes(lanes, used);
}

}  // namespace

double fold_lanes(const double* lanes, int64_t used) {
  double total = 0.0;
  for (int64_t begin = 0; begin < used; begin += kWarpLanes) {  // a warp of zeros adds nothing: skipped
    const double* warp = lanes + begin;
    double fours[kWarpThreads];
    for (int64_t t = 0; t < kWarpThreads; ++t) {
      fours[t] = (warp[4 * t] + warp[4 * t + 1]) + (warp[4 * t + 2] + warp[4 * t + 3]);
    }
    for (int64_t half = kWarpThreads / 2; half > 0; half /= 2) {
      for (int64_t t = 0; t < half; ++t) {
        fours[t] += fours[t + half];
      }
    }
    total += fours[0];
  }
  return total;
}

std::vector<SumSquares> sumsq(std::span<const NormRow> rows) {
  SegmentTable segments(kNormChunkNumel);
  for (size_t r = 0; r < rows.size(); ++r) {
    segments.add(rows[r].numel);
  }
  const int64_t chunks = segments.chunks();
  std::vector<double> partial(static_cast<size_t>(chunks));
  const int64_t grain = SegmentTable::grain(chunks, segments.first_element(segments.rows()), kNormGrainNumel);
  const CpuKernels& kernels = cpu_kernels();
  parallel_for(chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const SegmentTable::Chunk chunk = segments.chunk(i);
      partial[static_cast<size_t>(i)] =
          chunk_sumsq(kernels, rows[static_cast<size_t>(chunk.row)], chunk.begin, chunk.numel);
    }
  });
  std::vector<SumSquares> results(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t first = segments.first_chunk(static_cast<int64_t>(r));
    results[r] =
        with_nonfinite_flag(fold(partial.data() + first, segments.first_chunk(static_cast<int64_t>(r) + 1) - first));
  }
  return results;
}

void SumsqAccumulator::reset() {
  std::fill_n(lanes_, used_lanes(), 0.0);
  sum_ = Fold();
  in_chunk_ = 0;
}

void SumsqAccumulator::close_chunk() {
  sum_.add(fold_lanes(lanes_, kNormLanes));
  std::fill_n(lanes_, kNormLanes, 0.0);
  in_chunk_ = 0;
}

// Calls take(offset, numel, lane) for the parts of the block that lie within one chunk, closing chunks as they fill.
template <class Take>
void SumsqAccumulator::by_chunk(int64_t numel, Take&& take) {
  IeeeFloats ieee;
  for (int64_t offset = 0; offset < numel;) {
    const int64_t part = std::min(numel - offset, kNormChunkNumel - in_chunk_);
    take(offset, part, in_chunk_ % kNormLanes);
    offset += part;
    in_chunk_ += part;
    if (in_chunk_ == kNormChunkNumel) {
      close_chunk();
    }
  }
}

void SumsqAccumulator::consume(const float* values, int64_t numel) {
  by_chunk(numel, [&](int64_t offset, int64_t part, int64_t lane) {
    cpu_kernels().sumsq(values + offset, DType::kFloat32, part, lane, lanes_);
  });
}

void SumsqAccumulator::store(void* to, DType dtype, const void* values, int64_t numel, bool add) {
  const size_t value_bytes = size_of(shard_sum_dtype(dtype));
  by_chunk(numel, [&](int64_t offset, int64_t part, int64_t lane) {
    const auto at = static_cast<size_t>(offset);
    cpu_kernels().store_sumsq(static_cast<std::byte*>(to) + at * size_of(dtype), dtype,
                              static_cast<const std::byte*>(values) + at * value_bytes, part, add, lane, lanes_);
  });
}

SumSquares SumsqAccumulator::result() const {
  Fold sum = sum_;
  if (in_chunk_ != 0) {
    sum.add(fold_lanes(lanes_, used_lanes()));
  }
  return with_nonfinite_flag(sum.result());
}

void expect_shard_dtype(DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat64) {
    throw TypeError(std::string("a gradient shard of ") + name_of(dtype) +
                    ": float32, bfloat16 and float64 are supported");
  }
}

void expect_shard_segments(std::span<const ShardAccumulator::Segment> segments, int64_t numel) {
  int64_t last = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    BW_EXPECTS(last <= segments[i].begin && segments[i].begin <= segments[i].end && segments[i].end <= numel,
               "segment " + std::to_string(i) + " is [" + std::to_string(segments[i].begin) + ", " +
                   std::to_string(segments[i].end) + ") after " + std::to_string(last) + " in a shard of " +
                   std::to_string(numel));
    last = segments[i].end;
  }
}

ShardAccumulator::ShardAccumulator(void* shard, DType dtype, int64_t numel, std::vector<Segment> segments)
    : shard_(static_cast<std::byte*>(shard)),
      dtype_(dtype),
      numel_(numel),
      goes_past_cache_(dtype == DType::kFloat32 && static_cast<size_t>(numel) * sizeof(float) >= kPastCacheBytes),
      segments_(std::move(segments)),
      results_(segments_.size()) {
  expect_shard_dtype(dtype_);
  expect_shard_segments(segments_, numel_);
}

void ShardAccumulator::start(bool add) {
  add_ = add;
  position_ = 0;
  segment_ = 0;
  sums_.reset();
  std::fill(results_.begin(), results_.end(), SumSquares{});
}

void ShardAccumulator::consume(int64_t begin, const void* values, int64_t numel) {
  BW_EXPECTS(begin == position_ && numel >= 0 && numel <= numel_ - begin,
             "block of " + std::to_string(numel) + " at " + std::to_string(begin) + ", expected at " +
                 std::to_string(position_) + " in a shard of " + std::to_string(numel_));
  IeeeFloats ieee;
  const int64_t end = begin + numel;
  const size_t value_bytes = size_of(shard_sum_dtype(dtype_));
  while (position_ < end) {
    while (segment_ < segments_.size() && segments_[segment_].end <= position_) {
      ++segment_;
    }
    const bool is_last = segment_ == segments_.size();
    const auto* const from =
        static_cast<const std::byte*>(values) + static_cast<size_t>(position_ - begin) * value_bytes;
    std::byte* const to = shard_ + static_cast<size_t>(position_) * size_of(dtype_);
    if (is_last || position_ < segments_[segment_].begin) {  // padding
      const int64_t stop = is_last ? end : std::min(end, segments_[segment_].begin);
      cpu_kernels().store(to, dtype_, from, stop - position_, add_);
      position_ = stop;
      continue;
    }
    const int64_t stop = std::min(end, segments_[segment_].end);
    if (goes_past_cache_ && !add_) {
      const auto* const floats = reinterpret_cast<const float*>(from);
      sums_.consume(floats, stop - position_);
      cpu_kernels().copy_past_cache(to, floats, static_cast<size_t>(stop - position_) * sizeof(float));
    } else {
      sums_.store(to, dtype_, from, stop - position_, add_);
    }
    position_ = stop;
    if (stop == segments_[segment_].end) {
      results_[segment_] = sums_.result();
      sums_.reset();
      ++segment_;
    }
  }
}

}  // namespace bucketwheel
