// Sums of squares by lane.// The square of a float is exact in double, so it does not matter whether the compiler would fuse it with the addition.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/bf16.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

template <class T>
void sumsq(const T* x, int64_t n, int64_t lane, double* lanes) {
  while (n > 0) {
    const int64_t row = kNormLanes - lane < n ? kNormLanes - lane : n;
    double* __restrict__ to = lanes + lane;
    for (int64_t i = 0; i < row; ++i) {
      double value;
      if constexpr (std::is_same_v<T, float>) {
        value = x[i];
      } else {
        value = widen_bf16(x[i]);
      }
      to[i] += value * value;
    }
    x += row;
    n -= row;
    lane = 0;
  }
}

template <bool kAdd>
void store_row(float* __restrict__ to, const float* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = kAdd ? to[i] + x[i] : x[i];
  }
}

void store(float* to, const float* x, int64_t n, bool add) { add ? store_row<true>(to, x, n) : store_row<false>(to, x, n); }

template <bool kAdd>
void store_sumsq_rows(float* __restrict__ to, const float* __restrict__ x, int64_t n, int64_t lane, double* lanes) {
  while (n > 0) {
    const int64_t row = kNormLanes - lane < n ? kNormLanes - lane : n;
    double* __restrict__ sums = lanes + lane;
    for (int64_t i = 0; i < row; ++i) {
      const float stored = kAdd ? to[i] + x[i] : x[i];
      to[i] = stored;
      sums[i] += static_cast<double>(stored) * static_cast<double>(stored);
    }
    to += row;
    x += row;
    n -= row;
    lane = 0;
  }
}

void store_sumsq(float* to, const float* x, int64_t n, bool add, int64_t lane, double* lanes) {
  add ? store_sumsq_rows<true>(to, x, n, lane, lanes) : store_sumsq_rows<false>(to, x, n, lane, lanes);
}

}  // namespace
}  // namespace bucketwheel
