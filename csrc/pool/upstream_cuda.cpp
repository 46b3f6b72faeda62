// Slabs of CUDA devices, from cudaMalloc and from the driver's virtual memory calls.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/upstream.h"

namespace bucketwheel {
namespace {

// The memory of one device that one upstream has given out.
class DeviceMemory {
 public:
  explicit DeviceMemory(int index) : device_(CudaDevice::at(index)), index_(index) {}
  CudaDevice& device() const { return device_; }
  int index() const { return index_; }

  // As CudaDevice::allocate_by; PoolError where that throws OutOfMemory. `what` is what needs the memory.
  void take(const std::string& what, CudaCall call, size_t size_bytes, const std::function<int()>& request) {
    const RelaxedCapture relaxed;  // somebody may be capturing something else
    try {
      device_.allocate_by(call, size_bytes, request);
    } catch (const OutOfMemory& error) {
      throw PoolError(what + " of " + error.what() + "; this upstream holds " + std::to_string(held_bytes_) +
                      " bytes: use smaller buckets, or less memory elsewhere");
    }
    held_bytes_ += size_bytes;
  }
  void give(size_t size_bytes) { held_bytes_ -= size_bytes; }

 private:
  CudaDevice& device_;
  const int index_;
  std::atomic<size_t> held_bytes_{0};
};
using DeviceMemoryRef = std::shared_ptr<DeviceMemory>;

// `calls` of a destructor.
void clean_up(const DeviceMemory& memory, const std::function<void()>& calls) noexcept {
  try {
    CudaGuard guard(memory.index());
    const RelaxedCapture relaxed;
    calls();
  } catch (const std::exception&) {  // the driver is gone, and the memory with it
  }
}

struct MallocSlab final : Slab {
  static constexpr const char* kUpstream = "cuda";

  MallocSlab(DeviceMemoryRef from, size_t asked_bytes) : memory(std::move(from)) {
    void* address = nullptr;
    memory->take("a slab", CudaCall::malloc_device, asked_bytes,
                 [&] { return BW_CUDA_CALL(malloc_device, &address, asked_bytes); });
    data = static_cast<std::byte*>(address);
    size_bytes = asked_bytes;
  }
  ~MallocSlab() override {
    memory->give(size_bytes);
    clean_up(*memory, [&] { (void)BW_CUDA_CALL(free_device, data); });
  }

  const DeviceMemoryRef memory;
};

// A range of addresses for good, with memory behind it while it is awake. cudaFree waits for the device, unmapping does
// not: what uses a slab is over when it goes to sleep or ends, and the pool has waited for its fences.
class VmmSlab final : public Slab {
 public:
  static constexpr const char* kUpstream = "vmm";

  VmmSlab(DeviceMemoryRef memory, size_t asked_bytes) : memory_(std::move(memory)) {
    {
      CudaGuard guard(memory_->index());
      const RelaxedCapture relaxed;
      size_t granularity = 0;
      BW_CUDA_TRY(mem_get_granularity, memory_->index(), &granularity);
      size_bytes = (asked_bytes + granularity - 1) / granularity * granularity;
      void* address = nullptr;
      BW_CUDA_TRY(mem_address_reserve, &address, size_bytes);
      data = static_cast<std::byte*>(address);
    }
    try {
      map("a slab");
    } catch (const Error&) {
      free_address();
      throw;
    }
  }
  ~VmmSlab() override {
    clean_up(*memory_, [&] { sleep(); });
    free_address();
  }

  bool sleep() override {
    if (is_mapped_) {
      CudaGuard guard(memory_->index());
      const RelaxedCapture relaxed;
      BW_CUDA_TRY(mem_unmap, data, size_bytes);
      is_mapped_ = false;
      memory_->give(size_bytes);
    }
    return true;
  }
  void wake() override {
    if (!is_mapped_) {
      map("waking a slab");
    }
  }

 private:
  void map(const char* what) {
    const int index = memory_->index();
    uint64_t handle = 0;
    memory_->take(what, CudaCall::mem_create, size_bytes,
                  [&] { return BW_CUDA_CALL(mem_create, &handle, size_bytes, index); });
    CudaGuard guard(index);
    const RelaxedCapture relaxed;
    const int error = BW_CUDA_CALL(mem_map, data, size_bytes, handle);
    (void)BW_CUDA_CALL(mem_release, handle);  // from here on the mapping alone keeps the memory
    is_mapped_ = error == kCudaSuccess;
    if (!is_mapped_) {
      memory_->give(size_bytes);
    }
    expect_success(CudaCall::mem_map, error);
    const int refused = BW_CUDA_CALL(mem_set_access, data, size_bytes, index);
    if (refused != kCudaSuccess) {
      sleep();
    }
    expect_success(CudaCall::mem_set_access, refused);
  }
  void free_address() noexcept {
    clean_up(*memory_, [&] { (void)BW_CUDA_CALL(mem_address_free, data, size_bytes); });
  }

  const DeviceMemoryRef memory_;
  bool is_mapped_ = false;
};

template <class DeviceSlab>
class CudaUpstream final : public Upstream {
 public:
  explicit CudaUpstream(int index) : memory_(std::make_shared<DeviceMemory>(index)) {}
  const char* name() const override { return DeviceSlab::kUpstream; }

  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<DeviceSlab>(memory_, size_bytes);
    slab->id = next_id_.fetch_add(1, std::memory_order_relaxed);
    memory_->device().fill(slab->data, 0, slab->size_bytes, nullptr);
    return slab;
  }

 private:
  const DeviceMemoryRef memory_;
  std::atomic<uint32_t> next_id_{0};
};

}  // namespace

UpstreamRef make_cuda_upstream(int index) { return std::make_shared<CudaUpstream<MallocSlab>>(index); }
UpstreamRef make_vmm_upstream(int index) { return std::make_shared<CudaUpstream<VmmSlab>>(index); }

}  // namespace bucketwheel
