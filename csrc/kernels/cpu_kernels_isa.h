// Everything that is compiled once per instruction set; cpu_plain.cpp, cpu_avx2.cpp and cpu_avx512.cpp include it.
//
// [Note: one copy per instruction set]
// The loops sit in an unnamed namespace, so each of those files has copies of its own. Were they inline functions with
// external linkage, the linker would keep one copy for all, perhaps one with instructions that this processor lacks.
// For the same reason they call nothing from standard headers but compiler builtins, and what they share with other
// files (adam_math.h, float16.h) is inlined by force.
#pragma once

#include <cstdint>

#include "kernels/adam_cpu.h"
#include "kernels/convert_cpu.h"
#include "kernels/cpu_kernels.h"
#include "kernels/norm_cpu.h"
#include "kernels/reduce_cpu.h"

namespace bucketwheel {
namespace {

consteval CpuKernels make_kernels(Isa isa) noexcept {
  return {isa, adam, sumsq, store_sumsq, store, convert, sum, copy_past_cache};
}

}  // namespace
}  // namespace bucketwheel
