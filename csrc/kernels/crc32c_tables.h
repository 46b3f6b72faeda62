// The tables of CRC32C, made by the compiler: what crc32c.h names the state is a polynomial over GF(2), bit 31 first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bucketwheel {

inline constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;  // Castagnoli's, reflected

// byte[k][b]: the state after byte b and k bytes of zero, from state 0.
struct Crc32cByteTables {
  uint32_t byte[8][256];
};
consteval Crc32cByteTables crc32c_byte_tables() {
  Crc32cByteTables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t state = b;
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ ((state & 1) != 0 ? kCrc32cPolynomial : 0);
    }
    tables.byte[0][b] = state;
  }
  for (int k = 1; k < 8; ++k) {
    for (int b = 0; b < 256; ++b) {
      const uint32_t state = tables.byte[k - 1][b];
      tables.byte[k][b] = (state >> 8) ^ tables.byte[0][state & 255];
    }
  }
  return tables;
}
inline constexpr Crc32cByteTables kCrc32cBytes = crc32c_byte_tables();

// What kCrc32cShiftBytes bytes of zero make of a state: the sum of at[k][byte k of it], since it is linear.
inline constexpr int kCrc32cShiftLog2 = 9;
inline constexpr size_t kCrc32cShiftBytes = size_t{1} << kCrc32cShiftLog2;
struct Crc32cShiftTables {
  uint32_t at[4][256];
};
consteval Crc32cShiftTables crc32c_shift_tables() {
  uint32_t of_bit[32];  // of the state that is one bit; first for one byte of zero, then for twice as many each time
  for (int i = 0; i < 32; ++i) {
    const uint32_t state = uint32_t{1} << i;
    of_bit[i] = (state >> 8) ^ kCrc32cBytes.byte[0][state & 255];
  }
  const auto shifted = [&](uint32_t state) {
    uint32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
      sum ^= (state >> i & 1) != 0 ? of_bit[i] : 0;
    }
    return sum;
  };
  for (int twice = 0; twice < kCrc32cShiftLog2; ++twice) {
    uint32_t next[32];
    for (int i = 0; i < 32; ++i) {
      next[i] = shifted(of_bit[i]);
    }
    for (int i = 0; i < 32; ++i) {
      of_bit[i] = next[i];
    }
  }
  Crc32cShiftTables tables{};
  for (int k = 0; k < 4; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      tables.at[k][b] = shifted(b << (8 * k));
    }
  }
  return tables;
}
inline constexpr Crc32cShiftTables kCrc32cShift = crc32c_shift_tables();

}  // namespace bucketwheel
