// Sums over ranks.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstdint>

#include "kernels/convert_cpu.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

// Integers, in arithmetic that wraps around, the same for signed ones.
BW_HD uint64_t widened(uint64_t x) { return x; }
BW_HD uint32_t widened(uint32_t x) { return x; }
BW_HD uint32_t widened(uint16_t x) { return x; }
BW_HD uint32_t widened(uint8_t x) { return x; }
BW_HD void put(uint64_t& to, uint64_t value) { to = value; }
BW_HD void put(uint32_t& to, uint32_t value) { to = value; }
BW_HD void put(uint16_t& to, uint32_t value) { to = static_cast<uint16_t>(value); }
BW_HD void put(uint8_t& to, uint32_t value) { to = static_cast<uint8_t>(value); }

template <class To, class From, int kWorld>
void sum_few(To* to, const void* const* from, int64_t n) {
  const From* a = static_cast<const From*>(from[0]);
  const From* b = static_cast<const From*>(from[kWorld > 1 ? 1 : 0]);
  const From* c = static_cast<const From*>(from[kWorld > 2 ? 2 : 0]);
  const From* d = static_cast<const From*>(from[kWorld > 3 ? 3 : 0]);
  BW_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    auto sum = widened(a[i]);
    if constexpr (kWorld > 1) {
      sum += widened(b[i]);
    }
    if constexpr (kWorld > 2) {
      sum += widened(c[i]);
    }
    if constexpr (kWorld > 3) {
      sum += widened(d[i]);
    }
    put(to[i], sum);
  }
}

// Any world: by blocks whose sums stay in the first-level cache. `to` is written after all of a block is read.
template <class To, class From>
void sum_many(To* to, const void* const* from, int world, int64_t n) {
  constexpr int64_t kBlock = 1024;
  decltype(widened(From{})) sums[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t numel = n - begin < kBlock ? n - begin : kBlock;
    for (int64_t i = 0; i < numel; ++i) {
      sums[i] = widened(static_cast<const From*>(from[0])[begin + i]);
    }
    for (int rank = 1; rank < world; ++rank) {
      const From* x = static_cast<const From*>(from[rank]) + begin;
      for (int64_t i = 0; i < numel; ++i) {
        sums[i] += widened(x[i]);
      }
    }
    for (int64_t i = 0; i < numel; ++i) {
      put(to[begin + i], sums[i]);
    }
  }
}

template <class To, class From>
void sum_typed(void* out, const void* const* from, int world, int64_t n) {
  To* to = static_cast<To*>(out);
  switch (world) {
    case 1:
      return sum_few<To, From, 1>(to, from, n);
    case 2:
      return sum_few<To, From, 2>(to, from, n);
    case 3:
      return sum_few<To, From, 3>(to, from, n);
    case 4:
      return sum_few<To, From, 4>(to, from, n);
    default:
      return sum_many<To, From>(to, from, world, n);
  }
}

void sum(void* to, DType to_dtype, const void* const* from, DType from_dtype, int world, int64_t n) {
  const bool to_float = to_dtype == DType::kFloat32;
  switch (from_dtype) {
    case DType::kFloat32:
      return sum_typed<float, float>(to, from, world, n);
    case DType::kBFloat16:
      return to_float ? sum_typed<float, BFloat16>(to, from, world, n)
                      : sum_typed<BFloat16, BFloat16>(to, from, world, n);
    case DType::kFloat16:
      return to_float ? sum_typed<float, Float16>(to, from, world, n) : sum_typed<Float16, Float16>(to, from, world, n);
    case DType::kFloat64:
      return sum_typed<double, double>(to, from, world, n);
    case DType::kInt64:
      return sum_typed<uint64_t, uint64_t>(to, from, world, n);
    case DType::kInt32:
      return sum_typed<uint32_t, uint32_t>(to, from, world, n);
    case DType::kInt16:
      return sum_typed<uint16_t, uint16_t>(to, from, world, n);
    case DType::kInt8:
    case DType::kUInt8:
      return sum_typed<uint8_t, uint8_t>(to, from, world, n);
  }
}

}  // namespace
}  // namespace bucketwheel
