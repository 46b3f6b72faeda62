// A CUDA table around another one: it counts the calls, and makes one fail or wait where a test has asked for that.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "device/cuda_api.h"

namespace bucketwheel {

enum class CudaCall : uint8_t {
#define BW_CUDA_ENUMERATOR(name, parameters) name,
  BW_CUDA_CALLS(BW_CUDA_ENUMERATOR)
#undef BW_CUDA_ENUMERATOR
};
inline constexpr size_t kCudaCallCount = 0
// NOLINTNEXTLINE(bugprone-macro-parentheses): a term of a sum
#define BW_CUDA_ONE(name, parameters) +1
    BW_CUDA_CALLS(BW_CUDA_ONE);
#undef BW_CUDA_ONE

// The `countdown`-th of the next calls of `call` (1: the next) returns `error` and is not made; with error 0 it is made,
// after a pause.
struct CudaFault {
  CudaCall call;
  uint64_t countdown;
  int error;
  int64_t delay_us;
};

namespace counting {

inline const CudaApi* real = nullptr;
inline std::atomic<uint64_t> counts[kCudaCallCount];
inline std::mutex faults_mutex;
inline auto* const faults = new std::vector<CudaFault>();  // never freed: calls may come while the process ends

inline int before(CudaCall call) {
  counts[static_cast<size_t>(call)].fetch_add(1, std::memory_order_relaxed);
  int error = kCudaSuccess;
  int64_t delay_us = 0;
  {
    std::lock_guard lock(faults_mutex);
    std::erase_if(*faults, [&](CudaFault& fault) {
      const bool is_due = fault.call == call && --fault.countdown == 0;
      error = is_due ? fault.error : error;
      delay_us += is_due ? fault.delay_us : 0;
      return is_due;
    });
  }
  std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return error;
}

template <auto kMember, CudaCall kCall>
struct Counted;
template <class... Args, int (*CudaApi::*kMember)(Args...), CudaCall kCall>
struct Counted<kMember, kCall> {
  static int call(Args... args) {
    const int error = before(kCall);
    return error != kCudaSuccess ? error : (real->*kMember)(args...);
  }
};

}  // namespace counting

// The table to install in the place of `api`; one of a process.
inline const CudaApi& counted(const CudaApi& api) {
  static CudaApi made;
  counting::real = &api;
  made = api;
// NOLINTNEXTLINE(bugprone-macro-parentheses): members
#define BW_COUNTED(name, parameters) \
  made.name = made.name == nullptr ? nullptr : &counting::Counted<&CudaApi::name, CudaCall::name>::call;
  BW_CUDA_CALLS(BW_COUNTED)
#undef BW_COUNTED
  return made;
}

inline uint64_t cuda_calls(CudaCall call) { return counting::counts[static_cast<size_t>(call)]; }

inline void plan_cuda_fault(const CudaFault& fault) {
  std::lock_guard lock(counting::faults_mutex);
  counting::faults->push_back(fault);
}

inline void clear_cuda_faults() {
  std::lock_guard lock(counting::faults_mutex);
  counting::faults->clear();
}

}  // namespace bucketwheel
