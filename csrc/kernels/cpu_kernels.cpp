#include "kernels/cpu_kernels.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"

namespace bucketwheel {
namespace {

const CpuKernels& kernels_for(Isa isa) {
  switch (isa) {
    case Isa::kPlain:
      return kCpuKernelsPlain;
    case Isa::kAvx2:
      return kCpuKernelsAvx2;
    case Isa::kAvx512:
      return kCpuKernelsAvx512;
  }
  return kCpuKernelsPlain;
}

constexpr const char* kNames[] = {"plain", "avx2", "avx512"};

const CpuKernels& choose() {
  const Isa best = processor_isa();
  const char* asked = std::getenv("BW_CPU_ISA");
  if (asked == nullptr || *asked == '\0') {
    return kernels_for(best);
  }
  for (int i = 0; i < 3; ++i) {
    if (std::string_view(asked) == kNames[i]) {
      BW_EXPECTS(i <= static_cast<int>(best),
                 std::string("BW_CPU_ISA=") + asked + ": this processor runs " + kNames[static_cast<int>(best)] + " at best");
      return kernels_for(static_cast<Isa>(i));
    }
  }
  throw ValueError(std::string("BW_CPU_ISA=") + asked + ": expected plain, avx2 or avx512");
}

}  // namespace

const char* name_of(Isa isa) { return kNames[static_cast<int>(isa)]; }

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace bucketwheel
