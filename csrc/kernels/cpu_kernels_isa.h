// Everything that is compiled once per instruction set; cpu_plain.cpp, cpu_avx2.cpp and cpu_avx512.cpp include it.
//
// [Note: one copy per instruction set]
// The loops are in an unnamed namespace, so each of those files has its own copies. If they were inline functions with
// external linkage, the linker would keep one copy for all, perhaps with instructions that this processor lacks. For
// the same reason they call only compiler builtins, nothing from standard headers, and what they share with other
// files (adam_math.h, float16.h) is inlined by force.
#pragma once

#include <cstdint>

#include "kernels/adam_cpu.h"
#include "kernels/convert_cpu.h"
#include "kernels/cpu_kernels.h"
#include "kernels/crc32c_cpu.h"
#include "kernels/norm_cpu.h"
#include "kernels/reduce_cpu.h"

namespace bucketwheel {
namespace {

consteval CpuKernels make_kernels(Isa isa) noexcept {
  return {isa, adam, sumsq, store_sumsq, store, convert, add, sum, copy_past_cache, crc32c};
}

}  // namespace
}  // namespace bucketwheel
