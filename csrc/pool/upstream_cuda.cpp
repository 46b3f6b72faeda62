// Slabs from cudaMalloc.
#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/upstream.h"

namespace bucketwheel {
namespace {

class CudaUpstream final : public Upstream {
 public:
  CudaUpstream(int index, std::function<std::string()> reclaim)
      : device_(CudaDevice::at(index)), index_(index), reclaim_(std::move(reclaim)) {}
  const char* name() const override { return "cuda"; }

  SlabRef allocate(size_t size_bytes) override {
    CudaGuard guard(index_);
    auto slab = std::make_shared<CudaSlab>(index_, reserved_bytes_);
    void* data = nullptr;
    int error = BW_CUDA_CALL(malloc_device, &data, size_bytes);
    std::string reclaimed;
    if (error == kCudaOutOfMemory && reclaim_) {
      reclaimed = reclaim_();
      error = BW_CUDA_CALL(malloc_device, &data, size_bytes);
    }
    if (error == kCudaOutOfMemory) {
      throw PoolError(out_of_memory(size_bytes, reclaimed));
    }
    expect_success(CudaCall::malloc_device, error);
    slab->data = static_cast<std::byte*>(data);
    slab->size_bytes = size_bytes;
    slab->id = next_id_.fetch_add(1, std::memory_order_relaxed);
    *reserved_bytes_ += size_bytes;
    device_.fill(data, 0, size_bytes, nullptr);
    return slab;
  }

 private:
  using Counter = std::shared_ptr<std::atomic<size_t>>;

  struct CudaSlab final : Slab {
    CudaSlab(int index, Counter reserved_bytes) : index(index), reserved_bytes(std::move(reserved_bytes)) {}
    ~CudaSlab() override {
      if (data == nullptr) {
        return;
      }
      *reserved_bytes -= size_bytes;
      try {
        CudaGuard guard(index);
        (void)BW_CUDA_CALL(free_device, data);
      } catch (const std::exception&) {  // the driver is gone, and the memory with it
      }
    }
    const int index;
    const Counter reserved_bytes;
  };

  std::string out_of_memory(size_t size_bytes, const std::string& reclaimed) const {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    BW_CUDA_TRY(mem_get_info, &free_bytes, &total_bytes);
    return "a slab of " + std::to_string(size_bytes) + " bytes on cuda:" + std::to_string(index_) +
           ": out of memory (" + std::to_string(free_bytes) + " of " + std::to_string(total_bytes) +
           " bytes are free, this upstream holds " + std::to_string(*reserved_bytes_) + ")" +
           (reclaimed.empty() ? "" : "; " + reclaimed) + ": use smaller buckets, or less memory elsewhere";
  }

  CudaDevice& device_;
  const int index_;
  const std::function<std::string()> reclaim_;
  const Counter reserved_bytes_ = std::make_shared<std::atomic<size_t>>(0);
  std::atomic<uint32_t> next_id_{0};
};

}  // namespace

UpstreamRef make_cuda_upstream(int index, std::function<std::string()> reclaim) {
  return std::make_shared<CudaUpstream>(index, std::move(reclaim));
}

}  // namespace bucketwheel
