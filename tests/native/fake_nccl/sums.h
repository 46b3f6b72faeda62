// What the fake computes: in rank order, accumulated in fp32 for 16-bit types, rounded once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/nccl/api.h"
#include "kernels/float16.h"

namespace fake_nccl {

inline constexpr int kPreMulSum = 5;  // beside kNcclSum ... kNcclAvg; the scalar has the type of the elements

inline size_t bytes_of(bucketwheel::NcclType type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[static_cast<int>(type)];
}

// How many of `count` elements NCCL's kernel for a factor with one rank writes: those of whole blocks (2.28.9).
inline size_t reached_by_one_rank(size_t count, size_t size) {
  const size_t blocks = std::clamp((count * size + 16383) / 16384, size_t{1}, size_t{32});
  const size_t pack = 16 / size;
  return std::min(count, (count / blocks + pack - 1) / pack * pack * blocks);
}

struct Float32 {
  using Stored = float;
  using Sum = float;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum value) { return value; }
};
struct Float64 {
  using Stored = double;
  using Sum = double;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum value) { return value; }
};
struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum load(Stored value) { return bucketwheel::widen_bf16(value); }
  static Stored store(Sum value) { return bucketwheel::round_to_bf16(value); }
};
struct Float16 {
  using Stored = uint16_t;
  using Sum = float;
  static Sum load(Stored value) { return bucketwheel::widen_fp16(value); }
  static Stored store(Sum value) { return bucketwheel::round_to_fp16(value); }
};
template <class Whole>
struct Integer {  // sums wrap
  using Stored = Whole;
  using Sum = int64_t;
  static Sum load(Stored value) { return value; }
  static Stored store(Sum value) { return static_cast<Stored>(value); }
};

inline float add(float a, float b) { return a + b; }
inline double add(double a, double b) { return a + b; }
inline int64_t add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

template <class Codec>
void reduce_as(const std::byte* const* from, int world, int op, const void* scalar, size_t count, std::byte* to) {
  using Stored = typename Codec::Stored;
  using Sum = typename Codec::Sum;
  const auto at = [](const void* place, size_t i) {
    Stored value;
    std::memcpy(&value, static_cast<const std::byte*>(place) + i * sizeof(Stored), sizeof(Stored));
    return Codec::load(value);
  };
  const Sum factor = op == kPreMulSum ? at(scalar, 0) : Sum{1};
  const auto of_rank = [&](int rank, size_t i) {
    return op == kPreMulSum ? at(from[rank], i) * factor : at(from[rank], i);
  };
  for (size_t i = 0; i < count; ++i) {
    Sum sum = of_rank(0, i);
    for (int rank = 1; rank < world; ++rank) {
      sum = add(sum, of_rank(rank, i));
    }
    if (op == bucketwheel::kNcclAvg) {
      sum /= static_cast<Sum>(world);
    }
    const Stored value = Codec::store(sum);
    std::memcpy(to + i * sizeof(Stored), &value, sizeof(Stored));
  }
}

inline bool can_reduce(bucketwheel::NcclType type) {
  using bucketwheel::NcclType;
  return type == NcclType::kFloat32 || type == NcclType::kFloat64 || type == NcclType::kBFloat16 ||
         type == NcclType::kFloat16 || type == NcclType::kInt32 || type == NcclType::kInt64;
}

inline void reduce(bucketwheel::NcclType type, const std::byte* const* from, int world, int op, const void* scalar,
                   size_t count, std::byte* to) {
  switch (type) {
    case bucketwheel::NcclType::kFloat32:
      return reduce_as<Float32>(from, world, op, scalar, count, to);
    case bucketwheel::NcclType::kFloat64:
      return reduce_as<Float64>(from, world, op, scalar, count, to);
    case bucketwheel::NcclType::kBFloat16:
      return reduce_as<BFloat16>(from, world, op, scalar, count, to);
    case bucketwheel::NcclType::kFloat16:
      return reduce_as<Float16>(from, world, op, scalar, count, to);
    case bucketwheel::NcclType::kInt32:
      return reduce_as<Integer<int32_t>>(from, world, op, scalar, count, to);
    case bucketwheel::NcclType::kInt64:
      return reduce_as<Integer<int64_t>>(from, world, op, scalar, count, to);
    default:
      return;  // can_reduce() was asked
  }
}

}  // namespace fake_nccl
