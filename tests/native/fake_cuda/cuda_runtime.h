// The part of CUDA C++ that our kernels use, for an ordinary C++ compiler: the kernels' sources are compiled
// unchanged, with this folder in the place of the CUDA toolkit's headers, and run by fibers.h.
//
// What it checks and what it cannot: [Note: emulated kernels] in fibers.h.
#pragma once

#include <bit>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_runtime_api.h"
#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

inline constexpr int warpSize = 32;

// Kernels look at one piece of memory as vectors and as elements, which the CUDA compiler allows.
struct __attribute__((may_alias, aligned(8))) uint2 {
  unsigned x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
  unsigned x, y, z, w;
};

// Plain accesses: what the hints hint at is not emulated. A misaligned one is undefined, as on the device, and the
// sanitizer for undefined behaviour says so.
template <class T>
inline T __ldcs(const T* from) {
  return *from;
}
template <class T>
inline void __stcs(T* to, T value) {
  *to = value;
}

// In a kernel: `type name[count]`, shared by the threads of a block.
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration
#define BW_SHARED(type, name, count)     \
  static constexpr char name##_site = 0; \
  type* const name = static_cast<type*>(fake_cuda::shared_memory(&name##_site, sizeof(type) * (count), alignof(type)))
// NOLINTEND(bugprone-macro-parentheses)

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  fake_cuda::sync_block(where);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, std::source_location where = std::source_location::current()) {
  fake_cuda::exchange(mask, 0, fake_cuda::lane(), where);
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, std::source_location where = std::source_location::current()) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = fake_cuda::exchange(mask, bits, from, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes,
                         std::source_location where = std::source_location::current()) {
  return __shfl_sync(mask, value, fake_cuda::lane() ^ lanes, where);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by,
                          std::source_location where = std::source_location::current()) {
  const int from = fake_cuda::lane() + static_cast<int>(by);
  return __shfl_sync(mask, value, from < warpSize ? from : fake_cuda::lane(), where);
}

// The arguments are copied now, as CUDA copies them, and the kernel runs when its stream comes to it.
template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t stream) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool is_empty = uint64_t{grid.x} * grid.y * grid.z == 0 || threads == 0;
  if (is_empty || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || threads > 1024 || block.z > 64) {
    return cudaErrorInvalidConfiguration;
  }
  if (shared != 0) {  // dynamic shared memory is not emulated
    return cudaErrorInvalidValue;
  }
  const auto values = [&]<size_t... i>(std::index_sequence<i...>) {
    return std::tuple<P...>(*static_cast<P*>(args[i])...);
  }(std::index_sequence_for<P...>());
  return static_cast<cudaError_t>(fake_cuda::enqueue(
      stream, [=] { fake_cuda::run_grid(grid, block, shared, [&] { std::apply(kernel, values); }); }));
}
