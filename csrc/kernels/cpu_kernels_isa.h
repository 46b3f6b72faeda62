// Everything that is compiled once per instruction set. The including file defines BW_ISA_NAMESPACE.
// No standard header with inline functions may be used in here: the linker keeps one copy of those for all, and it might
// be the one with instructions that this processor lacks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/bf16.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel::BW_ISA_NAMESPACE {
namespace {

#include "kernels/adam_cpu.h"
#include "kernels/norm_cpu.h"
#include "kernels/reduce_cpu.h"

constexpr CpuKernels make_kernels(Isa isa) {
  using U = uint16_t;
  return {isa,
          {{{adam_chunk<float, float, false>, adam_chunk<float, float, true>},
            {adam_chunk<float, U, false>, adam_chunk<float, U, true>}},
           {{adam_chunk<U, float, false>, adam_chunk<U, float, true>},
            {adam_chunk<U, U, false>, adam_chunk<U, U, true>}}},
          sumsq<float>,
          sumsq<U>,
          store_sumsq,
          store,
          widen,
          narrow,
          sum<float, float>,
          sum<float, U>,
          sum<U, U>};
}

}  // namespace
}  // namespace bucketwheel::BW_ISA_NAMESPACE
