// The CPU kernels for AVX-512 F, BW, DQ and VL.
#include "kernels/cpu_kernels_isa.h"

namespace bucketwheel {
constinit const CpuKernels kCpuKernelsAvx512 = make_kernels(Isa::kAvx512);
}  // namespace bucketwheel
