// Pools and upstreams for the tests of csrc/pool.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>

#include "device/device.h"
#include "pool/pool.h"

namespace bucketwheel {

inline constexpr size_t kSlab = size_t{1} << 20;

inline PoolRef make_pool(PoolOptions options = {512, kSlab, false}) {
  return Pool::make(cpu_device(), make_host_upstream(), options);
}

// All bytes are `value`: the first one is, and each equals its neighbour (memcmp, which is quick under sanitizers too).
inline bool holds_only(const std::byte* bytes, size_t size, int value) {
  return size == 0 || (bytes[0] == std::byte(value) && std::memcmp(bytes, bytes + 1, size - 1) == 0);
}

// Counts what is mapped.
struct CountedUpstream final : Upstream {
  struct Counted final : Slab {
    std::shared_ptr<std::atomic<int>> count;
    SlabRef inner;
    ~Counted() override { --*count; }
  };
  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<Counted>();
    slab->inner = host->allocate(size_bytes);
    slab->data = slab->inner->data;
    slab->size_bytes = slab->inner->size_bytes;
    slab->id = slab->inner->id;
    slab->count = mapped;
    ++*mapped;
    ++allocated;
    return slab;
  }
  UpstreamRef host = make_host_upstream();
  std::shared_ptr<std::atomic<int>> mapped = std::make_shared<std::atomic<int>>(0);
  int allocated = 0;
};

}  // namespace bucketwheel
