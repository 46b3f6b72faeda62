// The CPU kernels for AVX-512 F, BW, DQ and VL.
#define BW_ISA_NAMESPACE isa_avx512
#include "kernels/cpu_kernels_isa.h"

namespace bucketwheel {
const CpuKernels kCpuKernelsAvx512 = isa_avx512::make_kernels(Isa::kAvx512);
}  // namespace bucketwheel
