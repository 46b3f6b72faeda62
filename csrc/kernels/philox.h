// Random bits for stochastic rounding: Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011), a function of a key and a counter without state. Seven rounds are the fewest that pass BigCrush; the
// usual ten would make a step in bfloat16 10 to 15 % slower.
//
// The counter says what an element is, not where it lies or who computes it: the parameter, the element's place in it
// (in memory order), and the step. So results do not depend on world size, sharding, launch
// geometry or device, also when a run resumes on another number of ranks.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {

// One block is 128 bits: 16 for each of 8 elements, kRandomBlockNumel * block ... of the parameter.
inline constexpr int64_t kRandomBlockNumel = 8;

struct RandomBlock {
  uint32_t word[4];
  BW_HD uint32_t bits16(int64_t element) const {
    const uint32_t lane = static_cast<uint32_t>(element) & 7u;
    return (word[lane >> 1] >> ((lane & 1u) * 16u)) & 0xffffu;
  }
};

inline constexpr int kPhiloxRounds = 7;
inline constexpr uint32_t kPhiloxM0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxM1 = 0xCD9E8D57u;

struct PhiloxKey {
  uint32_t k0;
  uint32_t k1;
  BW_HD explicit PhiloxKey(uint64_t key) : k0(static_cast<uint32_t>(key)), k1(static_cast<uint32_t>(key >> 32)) {}
  BW_HD void next() {
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
};

BW_HD RandomBlock philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  PhiloxKey key(seed);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxM0} * c0;
    const uint64_t b = uint64_t{kPhiloxM1} * c2;
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key.k0;
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key.k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = next0;
    c2 = next2;
    key.next();
  }
  return {{c0, c1, c2, c3}};
}

// The last word of the counter. `param` < 2^30: the factor is part of the bits that runs resume with.
BW_HD uint32_t random_place(uint32_t param) { return param * 4u; }

// The random bits of the 8 elements [8 * block, 8 * block + 8) of a parameter. random_cpu.h makes many at once.
BW_HD RandomBlock random_block(uint64_t seed, uint32_t param, int64_t block, int64_t step) {
  const auto place = static_cast<uint64_t>(block);
  return philox(seed, static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32), static_cast<uint32_t>(step),
                random_place(param));
}

}  // namespace bucketwheel
