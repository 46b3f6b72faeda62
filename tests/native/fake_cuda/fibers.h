// Runs a CUDA kernel without a GPU: one block after the other, the threads of a block as fibers of the calling thread.
//
// [Note: emulated kernels]
// A thread runs until it has to wait for others (a barrier, a shuffle) or ends; then another one goes on: in order,
// or as a seed chooses, all mixed in one block and warps running ahead of others in the next. A kernel that never
// waits is a plain loop over its threads. Shared memory is poisoned before each block. These are faults, because CUDA
// leaves them undefined or hangs:
//   - a barrier at two places of the source at once; a barrier after a thread of the block has ended, or the
//     other way round
//   - a shuffle by a thread outside its mask, from a lane outside it, or with a mask that names ended threads; two
//     shuffles of the source at once with one mask
//   - threads that wait for each other for ever
//   - more static shared memory than the 48 KiB that a kernel gets without asking
// Under the address and undefined-behaviour sanitizers, bounds, alignment and overflows of the real source are
// checked as well, and equal bits for many seeds speak against missing barriers. Not emulated: races between blocks,
// the memory model, fast math, launch attributes, time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <stdexcept>

#include "cuda_runtime_api.h"

struct uint3 {
  unsigned x, y, z;
};

inline constinit thread_local uint3 threadIdx{};
inline constinit thread_local uint3 blockIdx{};
inline constinit thread_local dim3 blockDim{};
inline constinit thread_local dim3 gridDim{};

namespace fake_cuda {

// The kernel did what a GPU would not survive, or would not say.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `body` for every thread of the grid, from any thread of the host. Throws Fault; the grid ends there. What the
// body throws by itself becomes a Fault too.
void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()>& body);

// Of all grids that start from now on: 0 runs blocks and threads in ascending order, any other number shuffles them.
void set_seed(uint64_t seed);

// While alive, grids started by this thread run only their blocks [first, last), counted x first: a test of what lies
// beyond 2^31 elements need not go through all of them.
class OnlyBlocks {
 public:
  OnlyBlocks(uint64_t first, uint64_t last);
  ~OnlyBlocks();
  OnlyBlocks(const OnlyBlocks&) = delete;
  OnlyBlocks& operator=(const OnlyBlocks&) = delete;
};

// What the language above is made of; only within a kernel.
int lane();
void sync_block(std::source_location where);
// Gives `value` to the warp's lanes in `mask`; the value of lane `from`.
uint64_t exchange(unsigned mask, uint64_t value, int from, std::source_location where);
void* shared_memory(const void* site, size_t size_bytes, size_t alignment);

}  // namespace fake_cuda
