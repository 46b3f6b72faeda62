// The inner loops of the CPU kernels, compiled once per instruction set from one source and chosen at run time.
//
// cpu_plain.cpp, cpu_avx2.cpp and cpu_avx512.cpp hold one CpuKernels each; their loops come from adam_cpu.h, norm_cpu.h
// and reduce_cpu.h. The results are bitwise equal (NaN payloads excepted): the loops do the same IEEE operations on each element, and the only sums over
// elements (norms) have a fixed order. The plain one computes fma by fmaf(): slow, same bits.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/platform.h"
#include "kernels/adam_math.h"

namespace bucketwheel {

// Where the elements of one chunk start. `p` is float, or bfloat16 bits with a float `master`; `g` float or bfloat16.
struct AdamPointers {
  void* p;
  const void* g;
  float* m;
  float* v;
  float* master;
};

inline constexpr int64_t kNormLanes = 1024;

struct CpuKernels {
  Isa isa;

  // One Adam step over n elements: [p is bfloat16][g is bfloat16][decoupled].
  using Adam = void (*)(const AdamPointers& at, int64_t n, const AdamScalars& scalars);
  Adam adam[2][2][2];

  // lanes[(lane + i) % kNormLanes] += double(x[i])^2, for i in order. lane < kNormLanes.
  void (*sumsq_f32)(const float* x, int64_t n, int64_t lane, double* lanes);
  void (*sumsq_bf16)(const uint16_t* x, int64_t n, int64_t lane, double* lanes);
  // to[i] = x[i], or to[i] += x[i]; then sumsq_f32 of to.
  void (*store_sumsq)(float* to, const float* x, int64_t n, bool add, int64_t lane, double* lanes);
  void (*store)(float* to, const float* x, int64_t n, bool add);

  // Casts, round to nearest even.
  void (*widen)(float* to, const uint16_t* from, int64_t n);
  void (*narrow)(uint16_t* to, const float* from, int64_t n);

  // to[i] = ((from[0][i] + from[1][i]) + from[2][i]) + ... in float; rounded once if `to` is bfloat16.
  // `to` may be one of `from` where the types are equal.
  void (*sum_f32)(float* to, const void* const* from, int world, int64_t n);
  void (*sum_bf16_to_f32)(float* to, const void* const* from, int world, int64_t n);
  void (*sum_bf16)(uint16_t* to, const void* const* from, int world, int64_t n);
};

// The best of this processor, or the one that BW_CPU_ISA (plain, avx2, avx512) names; chosen at the first call.
// ValueError if the processor cannot run it.
const CpuKernels& cpu_kernels();

const char* name_of(Isa isa);

extern const CpuKernels kCpuKernelsPlain;
extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

}  // namespace bucketwheel
