// CRC32C, by the instruction where there is one, else by tables, 8 bytes a step.
//
// The instruction takes 3 cycles and one can start each cycle: so three blocks run side by side, and the state of each is
// carried over the bytes of the next (shift).
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {
namespace {

// Castagnoli's, reflected: a state is a polynomial over GF(2), bit 31 its constant term.
inline constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;

// `state` times x.
constexpr uint32_t crc32c_doubled(uint32_t state) { return (state >> 1) ^ ((state & 1) * kCrc32cPolynomial); }

BW_FORCE_INLINE uint64_t word_at(const unsigned char* from) {
  uint64_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return word;
}

#if BW_HAS_CRC32C
BW_FORCE_INLINE uint32_t step(uint32_t state, uint64_t word) { return crc32c_word(state, word); }
BW_FORCE_INLINE uint32_t step(uint32_t state, unsigned char byte) { return crc32c_byte(state, byte); }
#else
// [k][b]: the state after byte b and k bytes of zero, from state 0.
inline constexpr auto kCrc32cBytes = [] {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t state = b;
    for (int bit = 0; bit < 64; ++bit) {
      state = crc32c_doubled(state);
      if (bit % 8 == 7) {
        table[bit / 8][b] = state;
      }
    }
  }
  return table;
}();
BW_FORCE_INLINE uint32_t step(uint32_t state, uint64_t word) {
  word ^= state;  // the first byte of memory is the lowest one
  uint32_t sum = 0;
  for (int k = 0; k < 8; ++k) {
    sum ^= kCrc32cBytes[7 - k][word >> (8 * k) & 255];
  }
  return sum;
}
BW_FORCE_INLINE uint32_t step(uint32_t state, unsigned char byte) {
  return (state >> 8) ^ kCrc32cBytes[0][(state ^ byte) & 255];
}
#endif

BW_FORCE_INLINE uint32_t steps(uint32_t state, const unsigned char* from, size_t bytes) {
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    state = step(state, word_at(from + i));
  }
  for (; i < bytes; ++i) {
    state = step(state, from[i]);
  }
  return state;
}

inline constexpr size_t kCrc32cBlock = size_t{8} << 10;  // long enough that shift() is a small part

// The product of two states as polynomials.
constexpr uint32_t crc32c_times(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int bit = 31; bit >= 0; --bit, b = crc32c_doubled(b)) {
    sum ^= -(a >> bit & 1) & b;
  }
  return sum;
}

// What kCrc32cBlock bytes of zero make of `state`: its product with x^(8 * kCrc32cBlock).
BW_FORCE_INLINE uint32_t shift(uint32_t state) {
  constexpr uint32_t kPower = [] {
    uint32_t power = uint32_t{1} << 30;  // x
    for (size_t bits = 1; bits < 8 * kCrc32cBlock; bits *= 2) {
      power = crc32c_times(power, power);
    }
    return power;
  }();
  return crc32c_times(kPower, state);
}

// The states that three blocks make of `state`, 0 and 0, as one.
BW_FORCE_INLINE uint32_t three_blocks(uint32_t state, const unsigned char* from) {
  uint32_t a = state, b = 0, c = 0;
  for (size_t i = 0; i < kCrc32cBlock; i += 8) {
    a = step(a, word_at(from + i));
    b = step(b, word_at(from + kCrc32cBlock + i));
    c = step(c, word_at(from + 2 * kCrc32cBlock + i));
  }
  return shift(shift(a) ^ b) ^ c;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t initial) {
  const auto* from = static_cast<const unsigned char*>(data);
  uint32_t state = ~initial;
  for (; bytes >= 3 * kCrc32cBlock; from += 3 * kCrc32cBlock, bytes -= 3 * kCrc32cBlock) {
    state = three_blocks(state, from);
  }
  return ~steps(state, from, bytes);
}

}  // namespace
}  // namespace bucketwheel
