// bfloat16 as bits: the codecs that every kernel and every device shares.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {

BW_HD float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
BW_HD uint32_t bits_of_float(float value) { return __builtin_bit_cast(uint32_t, value); }

// Exact.
BW_HD float widen_bf16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// Round to nearest, ties to even; above the largest finite value to infinity; every NaN to 0x7fc0.
BW_HD uint16_t round_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

}  // namespace bucketwheel
