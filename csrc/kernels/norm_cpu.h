// Sums of squares by lane.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>

#include "kernels/convert_cpu.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

// A float's square is exact in double, so the sum is rounded once, whether or not the two operations are fused.
BW_HD double add_square(double sum, float x) {
  const double value = x;
#if BW_FAST_FMA
  return __builtin_fma(value, value, sum);
#else
  return sum + value * value;
#endif
}
// A double's square is rounded first, on every device.
BW_HD double add_square(double sum, double value) { return sum + value * value; }

// What is summed: an array as it is.
template <class T>
struct Read {
  const T* x;
  BW_HD auto take(int64_t i) const { return widened(x[i]); }
  BW_HD void prefetch(int64_t i) const { __builtin_prefetch(x + i); }
};

// What is summed: `to`, after x has been stored there or added to it.
template <class To, bool kAdd>
struct Store {
  using Sum = decltype(widened(To{}));
  To* to;
  const Sum* x;
  BW_HD Sum take(int64_t i) const {
    To stored;
    put(stored, kAdd ? widened(to[i]) + x[i] : x[i]);
    to[i] = stored;
    return widened(stored);
  }
  BW_HD void prefetch(int64_t i) const { __builtin_prefetch(to + i); }  // x comes from the cache
};

// Adds the squares of kRows rows of lanes, from element `begin`, to the lanes [lane, lane + numel). Several rows at a
// time save loads and stores of the lanes; each lane still takes its elements in ascending order.
template <int kRows, class Source>
BW_HD void add_rows(const Source& source, int64_t begin, int64_t numel, double* lanes) {
  BW_ELEMENTWISE
  for (int64_t i = 0; i < numel; ++i) {
    double sum = lanes[i];
    for (int row = 0; row < kRows; ++row) {
      sum = add_square(sum, source.take(begin + row * kNormLanes + i));
    }
    lanes[i] = sum;
  }
}

template <class Source>
BW_HD void add_squares(const Source& source, int64_t n, int64_t lane, double* lanes) {
  constexpr int kRows = 4;
  constexpr int64_t kGroup = kRows * kNormLanes;
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  if (lane != 0) {
    const int64_t head = kNormLanes - lane < n ? kNormLanes - lane : n;
    add_rows<1>(source, 0, head, lanes + lane);
    i = head;
  }
  for (; i + kGroup <= n; i += kGroup) {
    for (int64_t block = 0; block < kNormLanes; block += kBlock) {
      // The processor's own prefetcher stops at each page of 4 KiB, and a row of floats is one.
      for (int64_t line = 0; line < kRows * kBlock; line += 16) {
        source.prefetch(i + kGroup + line / kBlock * kNormLanes + block + line % kBlock);
      }
      add_rows<kRows>(source, i + block, kBlock, lanes + block);
    }
  }
  while (i < n) {
    const int64_t row = kNormLanes < n - i ? kNormLanes : n - i;
    add_rows<1>(source, i, row, lanes);
    i += row;
  }
}

void sumsq(const void* x, DType dtype, int64_t n, int64_t lane, double* lanes) {
  with_float(dtype,
             [&](auto in) { add_squares(Read<decltype(in)>{static_cast<const decltype(in)*>(x)}, n, lane, lanes); });
}

// Calls use(to, x) with pointers of the right types.
template <class Use>
void with_types(void* to, DType to_dtype, const void* x, const Use& use) {
  if (to_dtype == DType::kFloat32) {
    use(static_cast<float*>(to), static_cast<const float*>(x));
  } else if (to_dtype == DType::kBFloat16) {
    use(static_cast<BFloat16*>(to), static_cast<const float*>(x));
  } else {
    use(static_cast<double*>(to), static_cast<const double*>(x));
  }
}

template <class To, class Sum>
void store_sumsq_typed(To* to, const Sum* x, int64_t n, bool add, int64_t lane, double* lanes) {
  add ? add_squares(Store<To, true>{to, x}, n, lane, lanes) : add_squares(Store<To, false>{to, x}, n, lane, lanes);
}

void store_sumsq(void* to, DType to_dtype, const void* x, int64_t n, bool add, int64_t lane, double* lanes) {
  with_types(to, to_dtype, x, [&](auto* out, const auto* in) { store_sumsq_typed(out, in, n, add, lane, lanes); });
}

template <class To, class Sum>
void store_typed(To* to, const Sum* x, int64_t n, bool add) {
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    put(to[i], add ? widened(to[i]) + x[i] : x[i]);
  }
}

void store(void* to, DType to_dtype, const void* x, int64_t n, bool add) {
  with_types(to, to_dtype, x, [&](auto* out, const auto* in) { store_typed(out, in, n, add); });
}

}  // namespace
}  // namespace bucketwheel
