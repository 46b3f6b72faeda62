// Slabs from cudaMalloc.
#include <atomic>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/upstream.h"

namespace bucketwheel {
namespace {

class CudaUpstream final : public Upstream {
 public:
  explicit CudaUpstream(int index) : device_(CudaDevice::at(index)), index_(index) {}
  const char* name() const override { return "cuda"; }

  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<CudaSlab>(index_, reserved_bytes_);
    const RelaxedCapture relaxed;  // somebody may be capturing something else
    try {
      slab->data = static_cast<std::byte*>(device_.allocate(size_bytes));
    } catch (const OutOfMemory& error) {
      throw PoolError("a slab of " + std::string(error.what()) + "; this upstream holds " +
                      std::to_string(*reserved_bytes_) + " bytes: use smaller buckets, or less memory elsewhere");
    }
    slab->size_bytes = size_bytes;
    slab->id = next_id_.fetch_add(1, std::memory_order_relaxed);
    *reserved_bytes_ += size_bytes;
    device_.fill(slab->data, 0, size_bytes, nullptr);
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
        const RelaxedCapture relaxed;
        (void)BW_CUDA_CALL(free_device, data);
      } catch (const std::exception&) {  // the driver is gone, and the memory with it
      }
    }
    const int index;
    const Counter reserved_bytes;
  };

  CudaDevice& device_;
  const int index_;
  const Counter reserved_bytes_ = std::make_shared<std::atomic<size_t>>(0);
  std::atomic<uint32_t> next_id_{0};
};

}  // namespace

UpstreamRef make_cuda_upstream(int index) { return std::make_shared<CudaUpstream>(index); }

}  // namespace bucketwheel
