#include "kernels/cpu_kernels.h"

#include <string>

#include "base/env.h"
#include "base/error.h"

namespace bucketwheel {
namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avx512"};

const CpuKernels& kernels_for(Isa isa) {
  if constexpr (kHasX86Kernels) {
    if (isa == Isa::kAvx2) {
      return kCpuKernelsAvx2;
    }
    if (isa == Isa::kAvx512) {
      return kCpuKernelsAvx512;
    }
  }
  return kCpuKernelsPlain;
}

const CpuKernels& choose() {
  const Isa best = processor_isa();
  const Isa asked = env().cpu_isa.value_or(best);
  BW_EXPECTS(asked <= best, std::string("environment variable BW_CPU_ISA='") + name_of(asked) +
                                "': this processor runs " + name_of(best) + " at best");
  return kernels_for(asked);
}

}  // namespace

const char* name_of(Isa isa) { return kNames[static_cast<size_t>(isa)]; }

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace bucketwheel
