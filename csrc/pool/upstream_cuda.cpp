// Slabs of CUDA devices, from cudaMalloc.
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/upstream.h"

namespace bucketwheel {
namespace {

// The memory of one device that one upstream has given out.
struct DeviceMemory {
  int index = 0;
  std::atomic<size_t> held_bytes{0};
};

struct CudaSlab final : Slab {
  CudaSlab(std::shared_ptr<DeviceMemory> from, size_t asked_bytes) : memory(std::move(from)) {
    try {
      data = static_cast<std::byte*>(CudaDevice::at(memory->index).allocate(asked_bytes));
    } catch (const OutOfMemory& error) {
      throw PoolError(std::string("a slab of ") + error.what() + "; this upstream holds " +
                      std::to_string(memory->held_bytes) + " bytes: use smaller buckets, or less memory elsewhere");
    }
    size_bytes = asked_bytes;
    memory->held_bytes += size_bytes;
  }
  ~CudaSlab() override {
    memory->held_bytes -= size_bytes;
    CudaDevice::at(memory->index).free(data);
  }

  const std::shared_ptr<DeviceMemory> memory;
};

class CudaUpstream final : public Upstream {
 public:
  explicit CudaUpstream(int index) { memory_->index = CudaDevice::at(index).id().index; }

  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<CudaSlab>(memory_, size_bytes);
    slab->id = new_id();
    CudaDevice::at(memory_->index).fill(slab->data, 0, slab->size_bytes, nullptr);
    return slab;
  }

 private:
  const std::shared_ptr<DeviceMemory> memory_ = std::make_shared<DeviceMemory>();
};

}  // namespace

UpstreamRef make_cuda_upstream(int index) { return std::make_shared<CudaUpstream>(index); }

}  // namespace bucketwheel
