// bfloat16, float16 and the split master as bits: the codecs that every kernel and every device shares.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {

BW_HD float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
BW_HD uint32_t bits_of_float(float value) { return __builtin_bit_cast(uint32_t, value); }
BW_HD bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// ---- bfloat16

// Exact.
BW_HD float widen_bf16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// Round to nearest, ties to even; above the largest finite value to infinity; every NaN to 0x7fc0. The result is the
// upper half of these bits; ignore the lower half.
BW_HD uint32_t bf16_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? 0x7fc00000u : rounded;
}
BW_HD uint16_t round_to_bf16(float value) { return static_cast<uint16_t>(bf16_bits(value) >> 16); }

// Stochastic rounding: up (away from zero) with probability (the 16 bits cut off) / 2^16. `random` is uniform in
// [0, 2^16). Values that bfloat16 holds stay as they are, infinities too; every NaN becomes 0x7fc0.
BW_HD uint32_t bf16_bits_stochastic(float value, uint32_t random) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = bits + random;  // infinities have nothing below, to which this could add a carry
  return value != value ? 0x7fc00000u : rounded;
}
BW_HD uint16_t round_to_bf16_stochastic(float value, uint32_t random) {
  return static_cast<uint16_t>(bf16_bits_stochastic(value, random) >> 16);
}

// ---- float16

// Exact.
BW_HD float widen_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const uint32_t normal = magnitude + (112u << 23);  // the exponents' biases differ by 112
  // A denormal has the exponent of the least normal number, and no implicit one: that is put there and taken away.
  const uint32_t denormal = bits_of_float(float_of_bits(magnitude + (113u << 23)) - 0x1p-14F);
  const uint32_t finite = magnitude < 0x00800000u ? denormal : normal;
  return float_of_bits(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

// Round to nearest, ties to even; above the largest finite value to infinity; every NaN to 0x7e00.
BW_HD uint16_t round_to_fp16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 0.5 has the ulp of float16's denormals, 2^-24: the sum rounds there.
  const uint32_t denormal = bits_of_float(float_of_bits(magnitude) + 0.5F) - 0x3f000000u;
  const uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  const uint32_t rounded = magnitude >= 0x477ff000u ? 0x7c00u : finite;
  return static_cast<uint16_t>(is_nan_bits(bits) ? 0x7e00u : sign | rounded);
}

// ---- the split master: a float32 as a bfloat16 and 16 bits more

// [Note: split master] The high half is the float rounded to bfloat16, ties away from zero. The low half holds the 16
// bits cut off; its top bit says whether the high half was rounded up. decode(encode(x)) == x for every x, except that
// a NaN becomes 0x7fc00000 first: otherwise the carry would turn 0x7fffffff into -0. The largest finite floats have an
// infinite high half and still decode. A bfloat16 that was not encoded here decodes with a low half of 0; with one that
// is left over from another value it decodes to a float that rounds to it, or to itself where there is none: 0 and
// infinity.
struct SplitMaster {
  uint16_t high;
  uint16_t low;
};
BW_HD SplitMaster split_master(float value) {
  const uint32_t raw = bits_of_float(value);
  const uint32_t bits = is_nan_bits(raw) ? 0x7fc00000u : raw;
  return {static_cast<uint16_t>((bits >> 16) + ((bits >> 15) & 1u)), static_cast<uint16_t>(bits)};
}
BW_HD float join_master(SplitMaster split) {
  const uint32_t low = split.low;
  const float joined = float_of_bits(((split.high - (low >> 15)) << 16) | low);
  return joined == joined ? joined : widen_bf16(split.high);
}

// ---- a float32 master beside a parameter of 16 bits that somebody may have written to

// The master if the parameter is what it rounds to, else the parameter.
// bfloat16: to nearest even, or halves away from zero, as a split master that was joined has rounded. Only the bits are
// compared, so a NaN with nearly all bits set is next to a zero.
BW_HD float followed_bf16(float master, uint16_t param) {
  const uint32_t unit = static_cast<uint32_t>(param) << 16;
  // From half a unit below to just below half a unit above; if the parameter is even, including that half.
  const bool is_near = bits_of_float(master) - unit + 0x8000u <= 0x10000u - (param & 1u);
  return is_near ? master : float_of_bits(unit);
}
BW_HD float followed_fp16(float master, uint16_t param) {
  return round_to_fp16(master) == param ? master : widen_fp16(param);
}

}  // namespace bucketwheel
