// Memory, values and comparisons for the tests of emulated CUDA kernels. Kernels run at the call: there are no streams.
#pragma once

#include <sys/mman.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "base/dtype.h"
#include "check.h"
#include "cuda_runtime.h"
#include "kernels/float16.h"

// NOLINTNEXTLINE(misc-definitions-in-headers): a test is one source
int fake_cuda::enqueue(cudaStream_t /*stream*/, std::function<void()> work) {
  work();
  return cudaSuccess;
}

namespace cuda_test {

using bucketwheel::DType;

inline uint64_t hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Any kind of float: of ordinary size mostly, now and then zero, tiny, huge and (unless `finite`) infinite or NaN.
inline double some_value(uint64_t key, bool finite = false) {
  const uint64_t bits = hash(key);
  const double sign = (bits & 1u) != 0 ? -1.0 : 1.0;
  const double fraction = 1.0 + static_cast<double>((bits >> 8) & 0xfffffu) / 0x100000;
  switch ((bits >> 1) % 64) {
    case 0:
      return sign * 0.0;
    case 1:
      return sign * fraction * 1e-41;
    case 2:
      return sign * fraction * 1e30;
    case 3:
      return finite ? sign * fraction : sign * kInfinity;
    case 4:
      return finite ? sign * fraction : kNaN;
    default:
      return sign * std::ldexp(fraction, static_cast<int>((bits >> 32) % 24) - 16);
  }
}

// `numel` elements that end where the allocation ends, `skip` bytes from where it starts, which is 16-byte aligned. The
// address sanitizer sees the first byte beyond.
class Array {
 public:
  Array() = default;
  Array(DType dtype, int64_t numel, size_t skip = 0)
      : dtype_(dtype), numel_(numel), skip_(skip), memory_(skip + static_cast<size_t>(numel) * size_of(dtype)) {}

  DType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  void* data() const { return const_cast<std::byte*>(memory_.data()) + skip_; }
  template <class T>
  T& at(int64_t i) const {
    T* place = reinterpret_cast<T*>(static_cast<std::byte*>(data()) + i * static_cast<int64_t>(sizeof(T)));
    return *place;
  }

  double get(int64_t i) const {
    switch (dtype_) {
      case DType::kFloat32:
        return at<float>(i);
      case DType::kFloat64:
        return at<double>(i);
      case DType::kBFloat16:
        return bucketwheel::widen_bf16(at<uint16_t>(i));
      case DType::kFloat16:
        return bucketwheel::widen_fp16(at<uint16_t>(i));
      default:
        return static_cast<double>(at<uint8_t>(i));
    }
  }
  // Rounded to nearest even; to 16 bits through float.
  void set(int64_t i, double value) const {
    switch (dtype_) {
      case DType::kFloat32:
        at<float>(i) = static_cast<float>(value);
        break;
      case DType::kFloat64:
        at<double>(i) = value;
        break;
      case DType::kBFloat16:
        at<uint16_t>(i) = bucketwheel::round_to_bf16(static_cast<float>(value));
        break;
      case DType::kFloat16:
        at<uint16_t>(i) = bucketwheel::round_to_fp16(static_cast<float>(value));
        break;
      default:
        at<uint8_t>(i) = static_cast<uint8_t>(value);
        break;
    }
  }
  void fill(uint64_t key, bool finite = false) const {
    for (int64_t i = 0; i < numel_; ++i) {
      set(i, some_value(key * 1'000'003 + static_cast<uint64_t>(i), finite));
    }
  }

  // Bit by bit, but all NaNs of a float dtype are one.
  bool equals(const Array& other) const {
    CHECK(dtype_ == other.dtype_ && numel_ == other.numel_);
    if (numel_ == 0 || std::memcmp(data(), other.data(), static_cast<size_t>(numel_) * size_of(dtype_)) == 0) {
      return true;
    }
    const bool is_float = dtype_ == DType::kFloat32 || dtype_ == DType::kFloat64;
    const auto bytes = static_cast<int64_t>(size_of(dtype_));
    for (int64_t i = 0; i < numel_; ++i) {
      const bool same = std::memcmp(&at<std::byte>(i * bytes), &other.at<std::byte>(i * bytes), size_of(dtype_)) == 0;
      if (!same && !(is_float && std::isnan(get(i)) && std::isnan(other.get(i)))) {
        std::fprintf(stderr, "element %lld of %lld: %.17g, not %.17g\n", static_cast<long long>(i),
                     static_cast<long long>(numel_), get(i), other.get(i));
        return false;
      }
    }
    return true;
  }

 private:
  DType dtype_ = DType::kUInt8;
  int64_t numel_ = 0;
  size_t skip_ = 0;
  std::vector<std::byte> memory_;
};

// Addresses for far more memory than the machine has; only pages that are written to exist. All zero.
class Reserved {
 public:
  explicit Reserved(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    CHECK(data_ != MAP_FAILED);
  }
  ~Reserved() { munmap(data_, bytes_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  size_t bytes_;
  void* data_;
};

// first_chunk of a table of rows of these sizes.
inline std::vector<int64_t> chunk_starts(const std::vector<int64_t>& sizes, int64_t chunk_numel) {
  std::vector<int64_t> starts = {0};
  for (const int64_t size : sizes) {
    starts.push_back(starts.back() + (size + chunk_numel - 1) / chunk_numel);
  }
  return starts;
}

// With the threads and blocks in order, and in several other orders.
template <class Body>
void in_several_orders(Body&& body) {
  for (uint64_t seed : {0, 1, 2}) {
    fake_cuda::set_seed(seed);
    body();
  }
  fake_cuda::set_seed(0);
}

}  // namespace cuda_test
