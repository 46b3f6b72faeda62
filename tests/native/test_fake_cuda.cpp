// The emulation of CUDA that the kernels' tests stand on: it computes what CUDA would, and every fault it promises to
// see shows in a small kernel that is wrong on purpose. Run by test_native.py.
// needs: base fibers
// runs: address thread
// slow: address
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_runtime.h"

int fake_cuda::enqueue(cudaStream_t /*stream*/, std::function<void()> work) {
  work();
  return cudaSuccess;
}

namespace {

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, A... args) {
  std::tuple<P...> values{args...};
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        CHECK(cudaLaunchKernel(kernel, grid, block, pointers, 0, nullptr) == cudaSuccess);
      },
      values);
}

// With the threads in order, and in several other orders.
template <class Body>
void in_many_orders(Body&& body) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    fake_cuda::set_seed(seed);
    body();
  }
  fake_cuda::set_seed(0);
}

#define CHECK_FAULT(text, ...) in_many_orders([&] { CHECK_THROWS(fake_cuda::Fault, text, launch(__VA_ARGS__)); });

// ---- what is right

__global__ void number_threads(int* to) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  to[block * blockDim.x * blockDim.y * blockDim.z + thread] += static_cast<int>(1 + block * 1000 + thread);
}

// Each warp by shuffles, the warps through shared memory, in a loop that uses both again and again.
__global__ void add_up(const int64_t* from, int64_t* to, int rounds) {
  BW_SHARED(int64_t, sums, 4);
  const unsigned thread = threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    int64_t sum = from[static_cast<unsigned>(round) * blockDim.x + thread];
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (thread % 32 == 0) {
      sums[thread / 32] = sum;
    }
    __syncthreads();
    if (thread == 0) {
      to[round] = sums[0] + sums[1] + sums[2] + sums[3];
    }
    __syncthreads();
  }
}

__global__ void reverse_half_warps(int* to) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 16) {
    to[lane] = __shfl_sync(0x0000ffffu, lane, 15 - lane);
  }
  const int below = __shfl_down_sync(0xffffffffu, lane, 1);
  __syncwarp();
  if (lane >= 16) {
    to[lane] = below;
  }
}

__global__ void show_shared(uint32_t* to) {
  BW_SHARED(uint32_t, memory, 8);
  to[blockIdx.x] = memory[threadIdx.x];
  memory[threadIdx.x] = 1;
}

// ---- what is wrong

__global__ void forgets_a_barrier(int* to) {
  BW_SHARED(int, value, 64);
  value[threadIdx.x] = static_cast<int>(threadIdx.x);
  to[threadIdx.x] = value[63 - threadIdx.x];
}
// The sums of a round are overwritten by warps that have gone on to the next.
__global__ void forgets_the_second_barrier(int* to) {
  BW_SHARED(int, values, 8);
  for (int round = 0; round < 4; ++round) {
    int value = 8 * round;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      value = __shfl_xor_sync(0xffffffffu, value, lanes);
    }
    if (threadIdx.x % 32 == 0) {
      values[threadIdx.x / 32] = value + static_cast<int>(threadIdx.x) / 32;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 0; warp < 8; ++warp) {
        to[8 * round + warp] = values[warp];
      }
    }
  }
}
__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void returns_before_a_barrier() {
  if (threadIdx.x == 0) {
    return;
  }
  __syncthreads();
}
__global__ void barrier_for_a_warp_only() {
  if (threadIdx.x < 32) {
    __syncthreads();
  }
}
__global__ void shuffles_with_ended_threads(int* to) {
  if (threadIdx.x == 7) {
    return;
  }
  to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void shuffles_without_itself(int* to) { to[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0); }
__global__ void reads_outside_the_mask(int* to) {
  if (threadIdx.x < 16) {
    to[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1, 16);
  }
}
__global__ void two_shuffles(int* to) {
  if (threadIdx.x < 16) {
    to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  } else {
    to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  }
}
__global__ void two_masks(int* to) {
  to[threadIdx.x] = __shfl_xor_sync(threadIdx.x == 0 ? 0x7fffffffu : 0xffffffffu, 1, 1);
}
__global__ void waits_for_itself(int* to) {
  if (threadIdx.x % 32 == 0) {
    __syncthreads();
  }
  to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void takes_much_shared_memory(char* to) {
  BW_SHARED(char, a, 32 * 1024);
  BW_SHARED(char, b, 16 * 1024 + 1);
  to[0] = a[0] == b[0];
}
__global__ void shuffles_with_missing_threads(int* to) { to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1); }
__global__ void throws() { throw std::runtime_error("thrown by a kernel"); }

}  // namespace

TEST(every_thread_runs_once_and_knows_its_place) {
  in_many_orders([] {
    const dim3 grid(2, 3, 4);
    const dim3 block(5, 3, 2);
    std::vector<int> seen(24 * 30);
    launch(number_threads, grid, block, seen.data());
    for (int i = 0; i < 24 * 30; ++i) {
      CHECK(seen[static_cast<size_t>(i)] == 1 + i / 30 * 1000 + i % 30);
    }
  });
}

TEST(shuffles_and_barriers_add_up_in_any_order) {
  constexpr int kRounds = 50;
  std::vector<int64_t> from(128 * kRounds);
  std::vector<int64_t> expected(kRounds);
  for (size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<int64_t>(i * i * 7919 % 10007);
    expected[i / 128] += from[i];
  }
  in_many_orders([&] {
    std::vector<int64_t> to(kRounds);
    launch(add_up, 1, 128, from.data(), to.data(), kRounds);
    CHECK(to == expected);
  });
}

TEST(shuffles_of_some_lanes_and_beyond_the_last_one) {
  in_many_orders([] {
    std::vector<int> to(32);
    launch(reverse_half_warps, 1, 32, to.data());
    for (int lane = 0; lane < 32; ++lane) {
      CHECK(to[static_cast<size_t>(lane)] == (lane < 16 ? 15 - lane : lane < 31 ? lane + 1 : 31));
    }
  });
}

TEST(shared_memory_is_poisoned_for_every_block) {
  std::vector<uint32_t> to(3);
  launch(show_shared, 3, 1, to.data());
  CHECK(to == std::vector<uint32_t>(3, 0xffffffffu));
}

TEST(a_forgotten_barrier_shows_in_another_order) {
  bool differs = false;
  std::vector<int> first(64);
  launch(forgets_a_barrier, 1, 64, first.data());
  in_many_orders([&] {
    std::vector<int> to(64);
    launch(forgets_a_barrier, 1, 64, to.data());
    differs |= to != first;
  });
  CHECK(differs);
}

TEST(a_warp_that_runs_ahead_shows) {
  int wrong = 0;
  in_many_orders([&] {
    std::vector<int> to(32);
    launch(forgets_the_second_barrier, 1, 256, to.data());
    for (int i = 0; i < 32; ++i) {
      if (to[static_cast<size_t>(i)] != i) {
        ++wrong;
        break;
      }
    }
  });
  CHECK(wrong >= 2);
}

TEST(faults_are_seen) {
  std::vector<int> to(64);
  CHECK_FAULT("divergent __syncthreads: at test_fake_cuda.cpp:", two_barriers, 1, 64);
  CHECK_FAULT("__syncthreads", returns_before_a_barrier, 1, 64);
  CHECK_FAULT("__syncthreads", barrier_for_a_warp_only, 1, 64);
  CHECK_FAULT("shuffle", shuffles_with_ended_threads, 1, 32, to.data());
  CHECK_FAULT("does not name the thread itself", shuffles_without_itself, 1, 32, to.data());
  CHECK_FAULT("which is not in its mask", reads_outside_the_mask, 1, 32, to.data());
  CHECK_FAULT("divergent shuffles in a warp", two_shuffles, 1, 32, to.data());
  CHECK_FAULT("deadlock: 0 threads wait at __syncthreads, ", two_masks, 1, 32, to.data());
  CHECK_FAULT("deadlock: ", waits_for_itself, 1, 64, to.data());
  CHECK_FAULT("or that the block does not have", shuffles_with_missing_threads, 1, 31, to.data());
  char byte = 0;
  CHECK_FAULT("49153 bytes of static shared memory", takes_much_shared_memory, 1, 1, &byte);
  CHECK_FAULT("thrown by a kernel", throws, 1, 32);
  fake_cuda::set_seed(0);
  CHECK_THROWS(fake_cuda::Fault, "after 1 threads of the block have ended", launch(returns_before_a_barrier, 1, 64));
  CHECK_THROWS(fake_cuda::Fault, "ends while 32 threads wait at __syncthreads", launch(barrier_for_a_warp_only, 1, 64));
  CHECK_THROWS(fake_cuda::Fault, "thread 7: ends, but a shuffle names it",
               launch(shuffles_with_ended_threads, 1, 32, to.data()));
}

TEST(a_fault_ends_the_grid_and_leaves_nothing_behind) {
  for (int i = 0; i < 20; ++i) {
    CHECK_THROWS(fake_cuda::Fault, "block (0,0,0) thread 32: divergent", launch(two_barriers, 3, 64));
    const std::vector<int64_t> from(128, i);
    std::vector<int64_t> to(1);
    launch(add_up, 1, 128, from.data(), to.data(), 1);
    CHECK(to[0] == 128 * i);
  }
}

TEST(bad_launches_are_refused) {
  std::vector<int> to(1);
  int* pointer = to.data();
  void* args[] = {&pointer};
  CHECK(cudaLaunchKernel(number_threads, 0, 32, args, 0, nullptr) == cudaErrorInvalidConfiguration);
  CHECK(cudaLaunchKernel(number_threads, 1, 1025, args, 0, nullptr) == cudaErrorInvalidConfiguration);
  CHECK(cudaLaunchKernel(number_threads, dim3(1, 65536), 32, args, 0, nullptr) == cudaErrorInvalidConfiguration);
  CHECK(cudaLaunchKernel(number_threads, 1, 32, args, 16, nullptr) == cudaErrorInvalidValue);
  CHECK(to[0] == 0);
}

TEST(only_some_blocks) {
  std::vector<int> to(10);
  {
    const fake_cuda::OnlyBlocks some(7, 9);
    launch(number_threads, 10, 1, to.data());
  }
  CHECK(to == std::vector<int>({0, 0, 0, 0, 0, 0, 0, 7001, 8001, 0}));
  launch(number_threads, 1, 1, to.data());
  CHECK(to[0] == 1);
}

TEST(several_threads_of_the_host_run_kernels_at_once) {
  std::vector<std::thread> hosts;
  std::atomic<int> right = 0;
  for (int host = 0; host < 4; ++host) {
    hosts.emplace_back([&right, host] {
      std::vector<int64_t> from(128 * 20, host);
      std::vector<int64_t> to(20);
      launch(add_up, 1, 128, from.data(), to.data(), 20);
      right += to == std::vector<int64_t>(20, 128 * host);
    });
  }
  for (std::thread& host : hosts) {
    host.join();
  }
  CHECK(right == 4);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
