// The inner loops of the CPU kernels, compiled once per instruction set from one source and chosen at run time.
//
// cpu_plain.cpp, cpu_avx2.cpp and cpu_avx512.cpp hold one CpuKernels each; their loops come from adam_cpu.h,
// norm_cpu.h, convert_cpu.h, reduce_cpu.h and crc32c_cpu.h. Their results have the same bits (except for NaN payloads):
// each element goes through the same IEEE operations, and the only sums over elements (norms) have a fixed order. The
// plain one computes an fma by fmaf(), which is slow.
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
  bool stochastic;  // bfloat16 v
  bool resync;      // AdamWeight::kMaster
};

inline constexpr int64_t kNormLanes = 1024;

struct CpuKernels {
  Isa isa;

  void (*adam)(const AdamRow& row, const AdamPass& pass, const AdamScalarsOf<double>& scalars);

  // lanes[(lane + i) % kNormLanes] += double(x[i])^2, for i in order. lane < kNormLanes. Of any of the four float
  // types.
  void (*sumsq)(const void* x, DType dtype, int64_t n, int64_t lane, double* lanes);
  // to[i] = x[i], or to[i] += x[i], computed in the type of x and rounded once to that of `to`; then sumsq of `to`. x
  // is float for kFloat32 and kBFloat16, double for kFloat64.
  void (*store_sumsq)(void* to, DType to_dtype, const void* x, int64_t n, bool add, int64_t lane, double* lanes);
  void (*store)(void* to, DType to_dtype, const void* x, int64_t n, bool add);

  // From one of the four float types to another one, and to[i] += from[i] of any two of them, as pack.h says.
  void (*convert)(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n);
  void (*add)(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n);

  // to[i] = ((from[0][i] + from[1][i]) + from[2][i]) + ... in float (float64: in double); rounded once to to_dtype,
  // which is from_dtype, or kFloat32 for floats of 16 bits; integers wrap around. `to` may be one of `from` where the
  // types are equal.
  void (*sum)(void* to, DType to_dtype, const void* const* from, DType from_dtype, int world, int64_t n);

  // Copies past the cache. The target is not read first, so a copy larger than the cache moves two thirds of the
  // bytes. Afterwards the target is not in the cache: use it for large copies that another thread reads, or this one
  // much later. Other threads see it like ordinary stores: after a store that follows and releases.
  void (*copy_past_cache)(void* to, const void* from, size_t bytes);

  // As crc32c.h says.
  uint32_t (*crc32c)(const void* data, size_t bytes, uint32_t initial);
};

// From this size on, an ordinary copy would displace more from the cache than it leaves there.
inline constexpr size_t kPastCacheBytes = size_t{1} << 20;

// The best one for this processor, or the one that BW_CPU_ISA (plain, avx2, avx512) names. Chosen at the first call.
// ValueError if the processor cannot run it.
const CpuKernels& cpu_kernels();

const char* name_of(Isa isa);

extern const CpuKernels kCpuKernelsPlain;
extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

}  // namespace bucketwheel
