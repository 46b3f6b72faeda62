// Copies, casts, additions, zeros and sums over ranks on CUDA: the arguments of a launch. Pointers are device memory.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/pack.h"

namespace bucketwheel {

// Every item, as kernels/pack.h says. The items travel in the kernel's parameters: a launch needs no device memory of its
// own, is independent of every other one, and a captured one is whole.
inline constexpr int64_t kCopyCudaChunkNumel = 16384;
struct CopyLaunch {
  static constexpr int64_t kMaxItems = 100;  // of 40 bytes: 4 KiB of parameters are what every CUDA version takes
  int64_t item_count = 0;
  int64_t chunks = 0;
  int max_blocks = 0;
  CopyItem items[kMaxItems] = {};
  int64_t first_chunk[kMaxItems + 1] = {};  // of each item, chunks of kCopyCudaChunkNumel elements; then all chunks
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
