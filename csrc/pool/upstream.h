// Upstream: where a pool gets its slabs from.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace bucketwheel {

// A large piece of memory. It stays mapped until the last reference to it is gone.
struct Slab {
  std::byte* data = nullptr;
  size_t size_bytes = 0;
  uint32_t id = 0;  // unique within its upstream, counted from 0
  int fd = -1;      // shm: the memfd other processes map; -1 otherwise

  Slab() = default;
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  virtual ~Slab() = default;
};
using SlabRef = std::shared_ptr<Slab>;

class Upstream {
 public:
  virtual ~Upstream() = default;
  // A zero-filled slab of at least `size_bytes`, aligned to 4096 bytes. Throws PoolError when the system refuses.
  virtual SlabRef allocate(size_t size_bytes) = 0;

 protected:
  uint32_t new_id() { return next_id_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> next_id_{0};
};
using UpstreamRef = std::shared_ptr<Upstream>;

// Private anonymous memory (mmap; huge pages asked for).
UpstreamRef make_host_upstream();

// memfd segments, sealed against shrinking, that a communicator hands to its peers. `on_slab` is called with every new
// slab before anybody can use it: there the communicator tells its peers to map it.
UpstreamRef make_shm_upstream(std::function<void(const SlabRef&)> on_slab = {});

// cudaMalloc of CUDA device `index` (CudaDevice::allocate), which torch's memory accounting does not see.
UpstreamRef make_cuda_upstream(int index);

}  // namespace bucketwheel
