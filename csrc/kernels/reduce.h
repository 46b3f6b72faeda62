// Sums over ranks of one host, in fixed rank order: what the shm and local communicators run on each block.
//
// Single-threaded, allocates nothing: the callers divide the work. Adds in float32; float64 in float64; integers wrap
// around.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace bucketwheel {

// out[i] = ((from[0][i] + from[1][i]) + from[2][i]) + ... for i < numel, any world >= 1. `dtype` is that of the inputs:
// kFloat32, kBFloat16 or kFloat16. `out` may be one of the inputs if they are float32; no other overlap.
void reduce_sum_fp32(const void* const* from, int world, DType dtype, int64_t numel, float* out);

// The same, rounded once (nearest even) to `dtype`, which may be any. `out` may be one of the inputs.
void reduce_sum(const void* const* from, int world, DType dtype, int64_t numel, void* out);

// to[i] = from[i], rounded to nearest even where `dtype`, that of `to`, needs it; a copy if it is kFloat32.
void store_fp32(void* to, DType dtype, const float* from, int64_t numel);

}  // namespace bucketwheel
