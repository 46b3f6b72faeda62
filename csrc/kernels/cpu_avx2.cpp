// The CPU kernels for AVX2 and FMA.
#include "kernels/cpu_kernels_isa.h"

namespace bucketwheel {
constinit const CpuKernels kCpuKernelsAvx2 = make_kernels(Isa::kAvx2);
}  // namespace bucketwheel
