// CudaBuffer: an array in device memory that grows.
//
// For tables that kernels read: small, set up once, changed rarely. The stream orders the work that uses a buffer; an
// owner that changes to another stream makes that one wait for the last use. Growing blocks until the device is idle.
#pragma once

#include <span>

#include "device/device_cuda.h"

namespace bucketwheel {

class CudaBuffer {
 public:
  explicit CudaBuffer(CudaDevice& device) : device_(&device) {}
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  ~CudaBuffer() { free(); }

  // At least `size_bytes`. Growing loses the contents. `is_captured`: a CUDA graph may use the present memory, which
  // is therefore never freed. DeviceError when the device has no memory, even after caches were emptied.
  void* reserve(size_t size_bytes, bool is_captured = false) {
    if (size_bytes > size_bytes_) {
      if (is_captured) {
        data_ = nullptr;
      }
      free();
      data_ = device_->allocate(size_bytes);
      size_bytes_ = size_bytes;
    }
    return data_;
  }
  // Copies `values` into the array, in `stream`'s order.
  template <class T>
  T* upload(std::span<const T> values, Stream& stream, bool is_captured = false) {
    void* const data = reserve(values.size_bytes(), is_captured);
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
      device_->free(data_);
    }
    data_ = nullptr;
    size_bytes_ = 0;
  }

  CudaDevice* device_;
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace bucketwheel
