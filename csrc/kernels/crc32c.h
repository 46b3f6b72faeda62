// CRC32C, the checksum of iSCSI (RFC 3720, appendix B.4): Castagnoli's polynomial, bits reflected, start and end inverted.
//
// `initial` is the checksum of what comes before: crc32c(b, crc32c(a)) is that of a followed by b; 0 before the first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu_kernels.h"

namespace bucketwheel {

inline uint32_t crc32c(const void* data, size_t bytes, uint32_t initial = 0) {
  return cpu_kernels().crc32c(data, bytes, initial);
}

}  // namespace bucketwheel
