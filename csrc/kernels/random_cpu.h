// Random bits (philox.h) for many elements at once.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>

#include "base/platform.h"
#include "kernels/philox.h"

namespace bucketwheel {
namespace {

// A vector of 64-bit lanes, one for each block of random bits. Only the low halves of the lanes count, which are what
// the multiplication instruction takes. The compiler alone would multiply 32-bit lanes, four times as slowly.
#if defined(__AVX512F__)
inline constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int64_t kVectorBytes = 32;
#else
inline constexpr int64_t kVectorBytes = 16;
#endif
using RandomLanes = uint64_t __attribute__((vector_size(kVectorBytes)));

// The full products of the low halves.
BW_HD RandomLanes multiply_low(RandomLanes a, RandomLanes b) {
#if defined(__AVX512F__)
  return reinterpret_cast<RandomLanes>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<RandomLanes>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<RandomLanes>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

inline constexpr int64_t kRandomLanes = kVectorBytes / 8;
// fill_random() writes whole groups of so many blocks.
inline constexpr int64_t kRandomGroup = 8;
inline constexpr int kRandomChains = kRandomGroup / kRandomLanes;  // computed side by side

// How many blocks hold the bits of the first `n` elements.
BW_HD int64_t random_blocks(int64_t n) { return (n + kRandomBlockNumel - 1) / kRandomBlockNumel; }

// random_block() of the blocks [first_block, first_block + blocks), 16 bits an element; up to kRandomGroup - 1 blocks
// more are written.
BW_HD void fill_random(uint16_t* to, int64_t blocks, uint64_t seed, uint32_t param, int64_t first_block, int64_t step) {
  RandomLanes lane_index;
  for (int64_t i = 0; i < kRandomLanes; ++i) {
    lane_index[i] = static_cast<uint64_t>(i);
  }
  for (int64_t begin = 0; begin < blocks; begin += kRandomGroup) {
    RandomLanes c0[kRandomChains], c1[kRandomChains], c2[kRandomChains], c3[kRandomChains];
    for (int chain = 0; chain < kRandomChains; ++chain) {
      c0[chain] = lane_index + static_cast<uint64_t>(first_block + begin + chain * kRandomLanes);
      c1[chain] = c0[chain] >> 32;
      c2[chain] = RandomLanes{} + static_cast<uint32_t>(step);
      c3[chain] = RandomLanes{} + random_place(param);
    }
    PhiloxKey key(seed);
#pragma GCC unroll 7  // else the chains lie in memory
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int chain = 0; chain < kRandomChains; ++chain) {
        const RandomLanes a = multiply_low(c0[chain], RandomLanes{} + kPhiloxM0);
        const RandomLanes b = multiply_low(c2[chain], RandomLanes{} + kPhiloxM1);
        c0[chain] = (b >> 32) ^ c1[chain] ^ key.k0;
        c2[chain] = (a >> 32) ^ c3[chain] ^ key.k1;
        c1[chain] = b;
        c3[chain] = a;
      }
      key.next();
    }
    for (int chain = 0; chain < kRandomChains; ++chain) {
      const RandomLanes low = (c0[chain] & 0xffffffffu) | (c1[chain] << 32);
      const RandomLanes high = (c2[chain] & 0xffffffffu) | (c3[chain] << 32);
      uint64_t pairs[2 * kRandomLanes];
      for (int64_t i = 0; i < kRandomLanes; ++i) {
        pairs[2 * i] = low[i];
        pairs[2 * i + 1] = high[i];
      }
      __builtin_memcpy(to + (begin + chain * kRandomLanes) * kRandomBlockNumel, pairs, sizeof(pairs));
    }
  }
}

}  // namespace
}  // namespace bucketwheel
