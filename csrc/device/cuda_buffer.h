// CudaBuffer: an array in device memory that grows, and a host copy that says what it holds.
//
// For tables that kernels read: small, set up once, changed rarely. Work that uses one is ordered by its stream; an owner
// that goes to another stream makes that wait for the last use. Growing blocks until the device is idle.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "device/device_cuda.h"

namespace bucketwheel {

class CudaBuffer {
 public:
  explicit CudaBuffer(CudaDevice& device) : device_(&device) {}
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  ~CudaBuffer() { free(); }

  // At least `size_bytes`; the contents are lost where it has to grow.
  void* reserve(size_t size_bytes) {
    if (size_bytes > size_bytes_) {
      free();
      CudaGuard guard(device_->id().index);
      const RelaxedCapture relaxed;
      BW_CUDA_TRY(malloc_device, &data_, size_bytes);
      size_bytes_ = size_bytes;
    }
    return data_;
  }
  // Makes the array what `values` are, in `stream`'s order.
  template <class T>
  T* upload(std::span<const T> values, Stream& stream) {
    void* const data = reserve(values.size_bytes());
    device_->upload(data, values.data(), values.size_bytes(), stream);
    return static_cast<T*>(data);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void free() noexcept {
    if (data_ != nullptr) {
      try {
        CudaGuard guard(device_->id().index);
        const RelaxedCapture relaxed;
        (void)BW_CUDA_CALL(free_device, data_);
      } catch (const std::exception&) {  // the driver is gone, and the memory with it
      }
    }
    data_ = nullptr;
    size_bytes_ = 0;
  }

  CudaDevice* device_;
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace bucketwheel
