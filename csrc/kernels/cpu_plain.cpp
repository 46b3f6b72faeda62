// The CPU kernels for the baseline of the architecture; also what processors other than x86-64 run.
#include "kernels/cpu_kernels_isa.h"

namespace bucketwheel {
constinit const CpuKernels kCpuKernelsPlain = make_kernels(Isa::kPlain);
}  // namespace bucketwheel
