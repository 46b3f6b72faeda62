// The CPU kernels for the baseline of the architecture; also what processors other than x86-64 run.
#define BW_ISA_NAMESPACE isa_plain
#include "kernels/cpu_kernels_isa.h"

namespace bucketwheel {
const CpuKernels kCpuKernelsPlain = isa_plain::make_kernels(Isa::kPlain);
}  // namespace bucketwheel
