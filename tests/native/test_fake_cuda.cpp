// The emulation of CUDA that the kernels' tests stand on: a kernel with a mistake that depends on the order of threads
// fails in it, and so do barriers that not all come to. Run by test_native.py.
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

__global__ void forgets_a_barrier(int* to) {
  BW_SHARED(int, value, 64);
  value[threadIdx.x] = static_cast<int>(threadIdx.x);
  to[threadIdx.x] = value[63 - threadIdx.x];
}

__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
}  // namespace

TEST(a_forgotten_barrier_shows_in_another_order) {
  bool is_seen = false;
  in_several_orders([&] {
    std::vector<int> to(64);
    launch(forgets_a_barrier, 64, to.data());
    for (int i = 0; i < 64; ++i) {
      is_seen |= to[static_cast<size_t>(i)] != 63 - i;
    }
  });
  CHECK(is_seen);
}

TEST(a_divergent_barrier_is_a_fault) {
  in_several_orders([&] {
    CHECK_THROWS(fake_cuda::Fault, "divergent __syncthreads: at test_fake_cuda.cpp:", launch(two_barriers, 64));
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
