// The emulation of CUDA that the kernels' tests stand on: a kernel with a mistake that depends on the order of threads
// fails in it, and so do barriers and shuffles that not all come to. Run by test_native.py.
// needs: base fibers
// runs: address
// slow: address
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_memory.h"

using namespace cuda_test;

namespace {

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 block, A... args) {
  std::tuple<P...> values{args...};
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        CHECK(cudaLaunchKernel(kernel, 1, block, pointers, 0, nullptr) == cudaSuccess);
      },
      values);
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

__global__ void forgets_a_barrier(int* to) {
  BW_SHARED(int, value, 64);
  value[threadIdx.x] = static_cast<int>(threadIdx.x);
  to[threadIdx.x] = value[63 - threadIdx.x];
}
// The sums of a round are overwritten by warps that have gone on to the next.
__global__ void forgets_the_second_barrier(int* to) {
  BW_SHARED(int, values, 2);
  for (int round = 0; round < 4; ++round) {
    const int value = __shfl_xor_sync(0xffffffffu, 2 * round, 16);
    if (threadIdx.x % 32 == 0) {
      values[threadIdx.x / 32] = value + static_cast<int>(threadIdx.x) / 32;
    }
    __syncthreads();
    for (int warp = 0; threadIdx.x == 0 && warp < 2; ++warp) {
      to[2 * round + warp] = values[warp];
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
__global__ void two_masks(int* to) {
  to[threadIdx.x] = __shfl_xor_sync(threadIdx.x == 0 ? 0x7fffffffu : 0xffffffffu, 1, 1);
}

}  // namespace

TEST(shuffles_and_barriers_add_up_in_any_order) {
  constexpr int kRounds = 50;
  std::vector<int64_t> from(128 * kRounds);
  std::vector<int64_t> expected(kRounds);
  for (size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<int64_t>(i * i * 7919 % 10007);
    expected[i / 128] += from[i];
  }
  in_several_orders([&] {
    std::vector<int64_t> to(kRounds);
    launch(add_up, 128, from.data(), to.data(), kRounds);
    CHECK(to == expected);
  });
}

TEST(forgotten_barriers_show_in_another_order) {
  for (const auto kernel : {forgets_a_barrier, forgets_the_second_barrier}) {
    std::vector<int> right(64);
    for (int i = 0; i < 64; ++i) {
      right[static_cast<size_t>(i)] = kernel == forgets_a_barrier ? 63 - i : i < 8 ? i : 0;
    }
    bool is_seen = false;
    in_several_orders([&] {
      std::vector<int> to(64);
      launch(kernel, 64, to.data());
      is_seen |= to != right;
    });
    CHECK(is_seen);
  }
}

TEST(barriers_and_shuffles_that_not_all_come_to_are_faults) {
  std::vector<int> to(64);
  in_several_orders([&] {
    CHECK_THROWS(fake_cuda::Fault, "divergent __syncthreads: at test_fake_cuda.cpp:", launch(two_barriers, 64));
    CHECK_THROWS(fake_cuda::Fault, "__syncthreads", launch(barrier_for_a_warp_only, 64));
    CHECK_THROWS(fake_cuda::Fault, "shuffle", launch(shuffles_with_ended_threads, 32, to.data()));
    CHECK_THROWS(fake_cuda::Fault, "deadlock: 0 threads wait at __syncthreads, ", launch(two_masks, 32, to.data()));
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
