// Pool: a caching allocator of communication memory with event-fenced reuse. [Note: reuse under fences] in pool.cpp.
// Lease: one live period of a range of its memory.
//
// Thread-safe. Freed memory stays in the pool; a slab goes back when the pool and all leases in it are gone. Which
// block an acquire gets depends on sizes and on the order of calls alone, never on which event happens to be done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/device.h"
#include "pool/upstream.h"

namespace bucketwheel {

class Pool;

class Lease {
 public:
  // A lease dropped without release() is released now and counted as dropped; but while a CUDA graph is captured in its
  // stream, it stays live for good.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  const std::string& key() const;
  size_t size_bytes() const;    // what was asked for
  std::byte* data() const;      // UseAfterRelease once released
  const SlabRef& slab() const;  // the slab it lies in
  size_t offset_bytes() const;  // in the slab
  DeviceId device() const;
  bool is_live() const;

  // Ends the lease. Its bytes may be given to the next owner at once; the next owner's stream waits for `after` (the
  // completion of the last use) before touching them. No event: the caller says that all use has ended.
  // ReleasedTwice when called again. CaptureError, and the lease stays live, for an event that is part of a CUDA graph.
  void release(EventRef after = nullptr);
  // Being dropped is its end: it does not count as dropped.
  void leave_to_owners();

 private:
  friend class Pool;
  struct State;
  explicit Lease(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};
using LeaseRef = std::shared_ptr<Lease>;

struct PoolStats {
  uint64_t reserved_bytes = 0;    // in slabs
  uint64_t live_bytes = 0;        // in leases, rounded to the alignment
  uint64_t high_water_bytes = 0;  // largest live_bytes seen
  uint64_t slabs = 0;
  uint64_t live_leases = 0;
  uint64_t acquires = 0;
  uint64_t reuses = 0;          // acquires served from memory used before
  uint64_t waits = 0;           // fences that an acquire made its stream (or the host) wait for
  uint64_t dropped_leases = 0;  // destroyed without release()
};

struct PoolOptions {
  size_t align_bytes = 512;                 // of every lease, a power of two
  size_t min_slab_bytes = size_t{8} << 20;  // smaller requests share a slab
  bool poison = false;  // fill bytes with 0xFF (NaN) when they become free to reuse, and keep red zones
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static std::shared_ptr<Pool> make(Device& device, UpstreamRef upstream, PoolOptions options = {});
  ~Pool();

  // An aligned range of `size_bytes` (0 is legal).
  //   stream: it waits for the fences of the bytes' last users; without one the host waits. Give one on CUDA: a lease
  //     that is dropped without release() counts as used until what is in that stream by then is done.
  //   key: names the lease in messages. KeyBusy if a lease of that key is live; an empty key may be live many times.
  //   CaptureError, with nothing changed, if the stream is being captured into a CUDA graph and the pool would have
  //     to grow, wait for a fence, or poison.
  LeaseRef acquire(std::string key, size_t size_bytes, const StreamRef& stream = nullptr);

  // The slab that contains [data, data + size_bytes) and the offset in it; null when it is not pool memory.
  // Cheap enough for every collective.
  struct Location {
    SlabRef slab;
    size_t offset_bytes = 0;
  };
  Location locate(const void* data, size_t size_bytes) const;

  Device& device() const;
  PoolStats stats() const;
  // Verifies every invariant (no overlap, sums match, alignment, coalescing, red zones); PoolError names the first
  // broken one.
  void check() const;
  // LeaseLeak naming the keys that are live.
  void expect_no_leases() const;
  // Returns the slabs without leases to the system, after waiting for their fences. Returns the number of bytes.
  size_t trim();

 private:
  Pool(Device& device, UpstreamRef upstream, PoolOptions options);
  friend class Lease;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};
using PoolRef = std::shared_ptr<Pool>;

}  // namespace bucketwheel
