// How our CUDA kernels are launched, and how their blocks divide the chunks of a segment table.
//
// Kernels are compiled by nvcc, and by an ordinary compiler against an emulation (tests/native/fake_cuda). So they use
// no <<< >>>, and BW_SHARED for shared memory.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>
#include <tuple>

#include "device/cuda_api.h"

#ifndef BW_SHARED
#define BW_SHARED(type, name, count) __shared__ type name[count]
#endif

namespace bucketwheel {

inline constexpr int kBlockThreads = kCudaBlockThreads;

// Launches kernel(args...) on `blocks` blocks of kBlockThreads threads. Returns a cudaError_t. Launches nothing for 0
// blocks, because CUDA refuses an empty grid.
template <class... P, class... A>
int launch_kernel(void (*kernel)(P...), int64_t blocks, void* stream, const A&... args) {
  static_assert((sizeof(P) + ... + 0) <= 4096, "what every CUDA version takes as parameters of a kernel");
  if (blocks <= 0) {
    return blocks == 0 ? cudaSuccess : cudaErrorInvalidValue;
  }
  std::tuple<P...> values(args...);
  return std::apply(
      [&](auto&... value) -> int {
        void* pointers[] = {&value...};
        return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), pointers, 0,
                                static_cast<cudaStream_t>(stream));
      },
      values);
}

// One block for each chunk, but at most `max_blocks`, which fill the device: going on to another chunk costs less than
// starting a block. Block b takes the chunks b, b + blocks, ..., so that blocks that run at the same time work on
// neighbours and share few pages of memory. -1, which launch_kernel() refuses, for a bad table.
inline int64_t blocks_for(int64_t chunks, int max_blocks) {
  return chunks < 0 || max_blocks < 1 ? -1 : chunks < max_blocks ? chunks : max_blocks;
}

// The row in [first_row, last_row) that owns `chunk`: the last one that starts at or before it. (Empty rows before it
// start there too, and own nothing.) For ascending chunks, start the search at the row of the chunk before.
__device__ __forceinline__ int64_t row_of_chunk(const int64_t* first_chunk, int64_t first_row, int64_t last_row,
                                                int64_t chunk) {
  while (last_row - first_row > 1) {
    const int64_t middle = first_row + (last_row - first_row) / 2;
    if (first_chunk[middle] <= chunk) {
      first_row = middle;
    } else {
      last_row = middle;
    }
  }
  return first_row;
}

}  // namespace bucketwheel
