#include "kernels/crc32c.h"

#include "kernels/cpu_kernels.h"

namespace bucketwheel {

uint32_t crc32c(const void* data, size_t bytes, uint32_t initial) { return cpu_kernels().crc32c(data, bytes, initial); }

}  // namespace bucketwheel
