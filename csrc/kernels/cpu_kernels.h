// The inner loops of the CPU kernels, compiled once per instruction set from one source and chosen at run time.
//
// cpu_plain.cpp, cpu_avx2.cpp and cpu_avx512.cpp hold one CpuKernels each; their loops come from adam_cpu.h,
// norm_cpu.h, convert_cpu.h and reduce_cpu.h. The results are bitwise equal (NaN payloads excepted): the
// loops do the same IEEE operations on each element, and the only sums over elements (norms) have a fixed order. The
// plain one computes fma by fmaf(): slow, same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/platform.h"
#include "kernels/adam_math.h"
#include "kernels/adam_variant.h"

namespace bucketwheel {

// One step over the elements [begin, begin + numel) of a row.
struct AdamPass {
  int64_t begin;
  int64_t numel;
  int64_t step;  // the key of the random bits, like seed
  uint64_t seed;
  bool decoupled;
  bool stochastic;        // bfloat16 v
  bool stochastic_param;  // a bfloat16 parameter with AdamWeight::kParam
};

inline constexpr int64_t kNormLanes = 1024;

struct CpuKernels {
  Isa isa;

  void (*adam)(const AdamRow& row, const AdamPass& pass, const AdamScalarsOf<double>& scalars);

  // lanes[(lane + i) % kNormLanes] += double(x[i])^2, for i in order. lane < kNormLanes. Of any of the four float
  // types.
  void (*sumsq)(const void* x, DType dtype, int64_t n, int64_t lane, double* lanes);
  // to[i] = x[i], or to[i] += x[i], computed as x is and rounded once to `to`; then sumsq of to. kFloat32 and kBFloat16
  // take floats, kFloat64 doubles.
  void (*store_sumsq)(void* to, DType to_dtype, const void* x, int64_t n, bool add, int64_t lane, double* lanes);
  void (*store)(void* to, DType to_dtype, const void* x, int64_t n, bool add);

  // From one of the four float types to another one, as pack.h says.
  void (*convert)(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n);

  // to[i] = ((from[0][i] + from[1][i]) + from[2][i]) + ... in float (float64: in double); rounded once to to_dtype,
  // which is from_dtype, or kFloat32 for floats of 16 bits; integers wrap around. `to` may be one of `from` where the
  // types are equal.
  void (*sum)(void* to, DType to_dtype, const void* const* from, DType from_dtype, int world, int64_t n);

  // Copies past the cache: the target is not read first, so a copy that outgrows the cache moves two thirds of the
  // bytes. What is written is not in the cache afterwards: for large copies that somebody else reads, or later. Other
  // threads see it as they see ordinary stores: with any store that follows and releases.
  void (*copy_past_cache)(void* to, const void* from, size_t bytes);
};

// From here on a copy would push more out of the cache than it leaves there.
inline constexpr size_t kPastCacheBytes = size_t{1} << 20;

// The best of this processor, or the one that BW_CPU_ISA (plain, avx2, avx512) names; chosen at the first call.
// ValueError if the processor cannot run it.
const CpuKernels& cpu_kernels();

const char* name_of(Isa isa);

extern const CpuKernels kCpuKernelsPlain;
extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

}  // namespace bucketwheel
