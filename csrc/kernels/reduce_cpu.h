// Casts, and sums over ranks.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/float16.h"

namespace bucketwheel {
namespace {

template <class T>
BW_HD float load(const T* x, int64_t i) {
  if constexpr (std::is_same_v<T, float>) {
    return x[i];
  } else {
    return widen_bf16(x[i]);
  }
}
template <class T>
BW_HD void save(T* to, int64_t i, float value) {
  if constexpr (std::is_same_v<T, float>) {
    to[i] = value;
  } else {
    to[i] = round_to_bf16(value);
  }
}

void widen(float* __restrict__ to, const uint16_t* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = widen_bf16(from[i]);
  }
}
void narrow(uint16_t* __restrict__ to, const float* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = round_to_bf16(from[i]);
  }
}

template <class To, class From, int kWorld>
void sum_few(To* to, const void* const* from, int64_t n) {
  const From* a = static_cast<const From*>(from[0]);
  const From* b = static_cast<const From*>(from[kWorld > 1 ? 1 : 0]);
  const From* c = static_cast<const From*>(from[kWorld > 2 ? 2 : 0]);
  const From* d = static_cast<const From*>(from[kWorld > 3 ? 3 : 0]);
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    float sum = load(a, i);
    if constexpr (kWorld > 1) {
      sum += load(b, i);
    }
    if constexpr (kWorld > 2) {
      sum += load(c, i);
    }
    if constexpr (kWorld > 3) {
      sum += load(d, i);
    }
    save(to, i, sum);
  }
}

// Any world: by blocks whose float sums stay in the first-level cache. `to` is written after all of a block is read.
template <class To, class From>
void sum_many(To* to, const void* const* from, int world, int64_t n) {
  constexpr int64_t kBlock = 1024;
  float sums[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t numel = n - begin < kBlock ? n - begin : kBlock;
    for (int64_t i = 0; i < numel; ++i) {
      sums[i] = load(static_cast<const From*>(from[0]) + begin, i);
    }
    for (int rank = 1; rank < world; ++rank) {
      const From* x = static_cast<const From*>(from[rank]) + begin;
      for (int64_t i = 0; i < numel; ++i) {
        sums[i] += load(x, i);
      }
    }
    for (int64_t i = 0; i < numel; ++i) {
      save(to + begin, i, sums[i]);
    }
  }
}

template <class To, class From>
void sum(To* to, const void* const* from, int world, int64_t n) {
  switch (world) {
    case 1:
      return sum_few<To, From, 1>(to, from, n);
    case 2:
      return sum_few<To, From, 2>(to, from, n);
    case 3:
      return sum_few<To, From, 3>(to, from, n);
    case 4:
      return sum_few<To, From, 4>(to, from, n);
  }
  sum_many<To, From>(to, from, world, n);
}

}  // namespace
}  // namespace bucketwheel
