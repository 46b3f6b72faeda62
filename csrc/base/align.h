// Rounding to powers of two, and the size of a cache line.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bucketwheel {

inline constexpr size_t kCacheLineBytes = 64;

constexpr bool is_power_of_two(size_t value) { return value != 0 && (value & (value - 1)) == 0; }

// `alignment` is a power of two; the result must fit in size_t.
constexpr size_t round_up(size_t value, size_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

inline bool is_aligned(const void* pointer, size_t alignment) {
  return (reinterpret_cast<uintptr_t>(pointer) & (alignment - 1)) == 0;
}

}  // namespace bucketwheel
