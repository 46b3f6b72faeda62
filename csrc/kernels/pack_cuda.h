// Copies, casts and sums over ranks on CUDA: the arguments of a launch. Pointers are device memory.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/pack.h"

namespace bucketwheel {

// to[i] = from[i] for every item, as kernels/pack.h says.
inline constexpr int64_t kCopyCudaChunkNumel = 16384;
struct CopyLaunch {
  const CopyItem* items = nullptr;
  const int64_t* first_chunk = nullptr;  // [item_count + 1], chunks of kCopyCudaChunkNumel elements
  int64_t item_count = 0;
  int64_t chunks = 0;
  int max_blocks = 0;
};

// to[i] = ((sources[0][i] + sources[1][i]) + ...) * factor / divisor, in float32 (float64: in float64), rounded once
// to dtype.
inline constexpr int64_t kReduceCudaChunkNumel = 16384;
struct ReduceLaunch {
  static constexpr int kMaxWorld = 64;
  void* to = nullptr;  // may be one of the sources
  const void* sources[kMaxWorld] = {};
  int world = 1;
  DType dtype = DType::kFloat32;  // float32, bfloat16, float16 or float64
  int64_t numel = 0;
  // Of the sum, before it is rounded.
  double factor = 1.0;   // of ReduceOp::kPreMul
  double divisor = 1.0;  // the world size for ReduceOp::kAvg
  int max_blocks = 0;
};

// Each enqueues its kernel and returns a cudaError_t: "invalid value", with nothing enqueued, for a dtype that cannot
// be summed or impossible sizes. Items whose dtypes pack.h cannot convert are skipped: check before.
int launch_copy(const CopyLaunch& launch, void* stream);
int launch_reduce(const ReduceLaunch& launch, void* stream);

}  // namespace bucketwheel
