// CRC32C, by the instruction where there is one, else by tables, 8 bytes a step.
//
// The instruction takes 3 cycles and one can start each cycle: so three blocks run side by side, and a table says what
// the bytes that follow make of the state of the first two ("shift").
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/platform.h"
#include "kernels/cpu_kernels.h"
#include "kernels/crc32c_tables.h"

namespace bucketwheel {
namespace {

BW_FORCE_INLINE uint64_t word_at(const unsigned char* from) {
  uint64_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return word;
}

#if BW_HAS_CRC32C
BW_FORCE_INLINE uint32_t step(uint32_t state, uint64_t word) { return crc32c_word(state, word); }
BW_FORCE_INLINE uint32_t step(uint32_t state, unsigned char byte) { return crc32c_byte(state, byte); }
#else
BW_FORCE_INLINE uint32_t step(uint32_t state, uint64_t word) {
  word ^= state;  // the first byte of memory is the lowest one
  uint32_t sum = 0;
  for (int k = 0; k < 8; ++k) {
    sum ^= kCrc32cBytes.byte[7 - k][word >> (8 * k) & 255];
  }
  return sum;
}
BW_FORCE_INLINE uint32_t step(uint32_t state, unsigned char byte) {
  return (state >> 8) ^ kCrc32cBytes.byte[0][(state ^ byte) & 255];
}
#endif

BW_FORCE_INLINE uint32_t shift(uint32_t state) {
  return kCrc32cShift.at[0][state & 255] ^ kCrc32cShift.at[1][state >> 8 & 255] ^
         kCrc32cShift.at[2][state >> 16 & 255] ^ kCrc32cShift.at[3][state >> 24];
}

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

constexpr size_t kThreeBlocks = 3 * kCrc32cShiftBytes;

// The states that three blocks make of `state`, 0 and 0, as one.
BW_FORCE_INLINE uint32_t three_blocks(uint32_t state, const unsigned char* from) {
  constexpr size_t kBlock = kCrc32cShiftBytes, kLine = 64;
  static_assert(kBlock % kLine == 0);
  uint32_t a = state, b = 0, c = 0;
  for (size_t i = 0; i < kBlock; i += kLine) {
    for (size_t line = 3 * i; line < 3 * (i + kLine); line += kLine) {
      // The processor's own prefetcher does not follow three short streams.
      __builtin_prefetch(from + 2 * kThreeBlocks + line);
    }
    for (size_t j = i; j < i + kLine; j += 8) {
      a = step(a, word_at(from + j));
      b = step(b, word_at(from + kBlock + j));
      c = step(c, word_at(from + 2 * kBlock + j));
    }
  }
  return shift(shift(a) ^ b) ^ c;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t initial) {
  const auto* from = static_cast<const unsigned char*>(data);
  uint32_t state = ~initial;
  for (; bytes >= kThreeBlocks; from += kThreeBlocks, bytes -= kThreeBlocks) {
    state = three_blocks(state, from);
  }
  return ~steps(state, from, bytes);
}

}  // namespace
}  // namespace bucketwheel
