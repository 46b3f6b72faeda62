// Sums of squares, and gradient shards, on CUDA: the arguments of a launch. The order of additions is that of norm.h,
// so results have the bits of the CPU's. Pointers are device memory unless said otherwise.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace bucketwheel {

// Elements of one tensor, or of one span of a shard.
struct NormCudaRow {
  const void* data;  // null in an accumulate launch
  int64_t begin;     // in an accumulate launch: element of the shard
  int64_t numel;
  DType dtype;
  uint8_t is_summed;  // 0: padding of a shard, stored only
  bool operator==(const NormCudaRow&) const = default;
};

// partial[c] = the sum of squares of chunk c (kNormChunkNumel elements) of the rows: steps 1 to 3 of [Note: order of
// a sum of squares] in norm.h.
struct SumsqLaunch {
  const NormCudaRow* rows = nullptr;
  const int64_t* first_chunk = nullptr;  // [row_count + 1]
  int64_t row_count = 0;
  int64_t chunks = 0;
  double* partial = nullptr;
  int max_blocks = 0;
};

// shard[i] = (or +=) the sum over ranks of sources[r][i], in rank order; and in the same pass SumsqLaunch of the
// stored values. The rows cover the shard in ascending order, without gaps. Computed in float and rounded once to the
// shard's dtype (float64: in double).
struct AccumulateLaunch {
  static constexpr int kMaxWorld = 64;
  void* shard = nullptr;
  DType shard_dtype = DType::kFloat32;  // or bfloat16; float64 where the sources are
  const void* sources[kMaxWorld] = {};
  int world = 1;
  DType dtype = DType::kFloat32;  // of the sources: float32, bfloat16, float16 or float64
  bool add = false;
  SumsqLaunch sums;
};

// sums[r] = the chunks of row r added as step 4 says, for the rows that are summed.
struct FoldLaunch {
  const NormCudaRow* rows = nullptr;
  const int64_t* first_chunk = nullptr;
  int64_t row_count = 0;
  const double* partial = nullptr;
  double* sums = nullptr;
};

// param_sums[i] = the sums of the rows rows_of[first_row_of[i]] ... of parameter i, added in order; 0 where held[i]
// is 0.
struct ParamSumsLaunch {
  const double* sums = nullptr;
  const int64_t* first_row_of = nullptr;  // [param_count + 1]
  const int64_t* rows_of = nullptr;
  const uint8_t* held = nullptr;  // null: all
  int64_t param_count = 0;
  double* param_sums = nullptr;
};

// sums[i] = by_rank[0][i] + by_rank[1][i] + ... in rank order, so all ranks have the same bits.
struct RankSumsLaunch {
  const double* by_rank = nullptr;  // [world][param_count]
  int world = 1;
  int64_t param_count = 0;
  double* sums = nullptr;
};

// The norm of the chosen gradients, and their factors after clipping. One block.
//   norm = sqrt(fold of param_sums[i] * factors[i]^2) * average
//   coefficient = min(1 / (float32(norm) + 1e-6) * max_norm, 1), a NaN stays; in float32, each operation rounded: so
//   torch.nn.utils.clip_grad_norm_ computes `max_norm / (norm + 1e-6)`. In double where `is_double`.
struct ClipLaunch {
  const double* param_sums = nullptr;  // over all ranks
  int64_t param_count = 0;
  double* factors = nullptr;
  const uint8_t* chosen = nullptr;  // null: all
  double average = 1.0;
  bool resets = false;    // the factors are set to 1 first
  double max_norm = 0.0;  // rounded to float32 unless is_double
  bool clips = false;     // multiplies the factors of the chosen by the coefficient
  bool is_double = false;
  void* norm = nullptr;           // [1], written: float32, or float64 where is_double
  double* param_norms = nullptr;  // not null: sqrt(param_sums[i]) * |factors[i]| * average, before clipping
};

// Each enqueues its kernel and returns a cudaError_t: "invalid value", with nothing enqueued, for an unknown dtype or
// impossible sizes.
int launch_sumsq(const SumsqLaunch& launch, void* stream);
int launch_accumulate(const AccumulateLaunch& launch, void* stream);
int launch_fold(const FoldLaunch& launch, void* stream);
int launch_param_sums(const ParamSumsLaunch& launch, void* stream);
int launch_rank_sums(const RankSumsLaunch& launch, void* stream);
int launch_clip(const ClipLaunch& launch, void* stream);

}  // namespace bucketwheel
