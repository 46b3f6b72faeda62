// The CPU kernels for AVX2 and FMA.
#define BW_ISA_NAMESPACE isa_avx2
#include "kernels/cpu_kernels_isa.h"

namespace bucketwheel {
const CpuKernels kCpuKernelsAvx2 = isa_avx2::make_kernels(Isa::kAvx2);
}  // namespace bucketwheel
