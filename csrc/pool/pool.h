// Pool: a caching allocator of communication memory with event-fenced reuse. [Note: reuse under fences] in pool.cpp.
// Lease: one live period of a range of its memory.
//
// A pool may have *plans* (plan.h): a key then lies where the plan of the regime puts it. What a plan does not have, or
// where it has put another lease that is still live, lies elsewhere in the pool, in the *side region*; but a *strict*
// pool refuses it.
//
// Thread-safe. Freed memory stays in the pool; a slab goes back when the pool and all leases in it are gone. Which
// block an acquire gets depends on sizes and on the order of calls alone, never on which event happens to be done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "pool/plan.h"
#include "pool/upstream.h"

namespace bucketwheel {

class Pool;
struct LeaseRecord;
struct PoolImpl;

// A lease dropped without release() is released then and counted as dropped; but while a CUDA graph is captured in its
// stream, it stays live for good.
class Lease {
 public:
  struct State;
  ~Lease() = default;  // by the LeaseRef that acquire() makes, which knows it is a State

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
  // Another stream uses the bytes: it waits for what the acquiring stream holds now, if there is one.
  void use(const StreamRef& stream);
  // The end of what is in `stream` (null: none) and in the streams of use() by now; null where there is nothing.
  EventRef end_of_use(StreamRef stream) const;

 private:
  friend struct LeaseRecord;
  Lease() = default;
  Lease(Lease&&) = default;
  State& state();
  const State& state() const;
};
using LeaseRef = std::shared_ptr<Lease>;

struct PoolStats {                // in the order of that in bucketwheel.pool.pool
  uint64_t reserved_bytes = 0;    // in slabs
  uint64_t live_bytes = 0;        // in leases, rounded to the alignment
  uint64_t high_water_bytes = 0;  // largest live_bytes seen
  uint64_t slabs = 0;
  uint64_t live_leases = 0;
  uint64_t acquires = 0;
  uint64_t reuses = 0;          // acquires served from memory used before
  uint64_t waits = 0;           // fences that an acquire made its stream (or the host) wait for
  uint64_t dropped_leases = 0;  // destroyed without release()
  uint64_t allocations = 0;     // of slabs, ever
  uint64_t host_waits = 0;      // acquires in which the host waited
  uint64_t planned_bytes = 0;   // of the arena
  uint64_t planned_live_bytes = 0;
  uint64_t planned_high_water_bytes = 0;
  uint64_t planned_acquires = 0;
  uint64_t divergences = 0;      // acquires of keys that the plan had no room for
  uint64_t side_live_bytes = 0;  // of these
  uint64_t side_high_water_bytes = 0;
  uint64_t steps = 0;
  uint64_t load_bytes = 0;  // of the plan of the regime
};

// What happened to leases while a trace was recorded.
struct PoolTrace {
  struct TracedLease {
    std::string key;
    size_t size_bytes = 0;
    std::string where;
  };
  struct Event {
    enum class Kind : uint8_t { kLive, kAcquire, kUse, kRelease };  // live: when the trace began
    Kind kind = Kind::kAcquire;
    bool has_event = false;        // of a release: it ends with an event, of whatever stream
    size_t lease = 0;              // in `leases`
    const void* stream = nullptr;  // which acquires or uses it; of a release the one that acquired. Null: the host
  };
  std::deque<TracedLease> leases;  // in the order of their acquires; first those that were live when the trace began
  std::vector<Event> events;
};

struct PoolOptions {
  size_t align_bytes = 512;                 // of every lease, a power of two
  size_t min_slab_bytes = size_t{8} << 20;  // smaller requests share a slab
  bool poison = false;  // fill bytes with 0xFF (NaN) when they become free to reuse, and keep red zones
};

class Pool {
 public:
  static std::shared_ptr<Pool> make(Device& device, UpstreamRef upstream, PoolOptions options = {});
  explicit Pool(std::shared_ptr<PoolImpl> impl) : impl_(std::move(impl)) {}  // for make()

  // An aligned range of `size_bytes` (0 is legal).
  //   stream: it waits for the fences of the bytes' last users; without one the host waits. Give one on CUDA: a lease
  //     that is dropped without release() counts as used until what is in that stream by then is done.
  //   key: names the lease in messages. KeyBusy if a lease of that key is live; an empty key may be live many times.
  //   CaptureError, with nothing changed, if the stream is being captured into a CUDA graph and the pool would have
  //     to grow, wait for a fence, or poison.
  //   where: the caller, for traces and the report of leaks.
  // With plans: see above; of a strict pool UnknownKey, SizeExceedsPlan, PlanDiverged, with nothing changed.
  LeaseRef acquire(std::string key, size_t size_bytes, const StreamRef& stream = nullptr, std::string where = {});

  // Gets a slab, unless a lease of `size_bytes` finds a free block: of the size that it needs, or one of `slab_bytes`.
  void reserve(size_t size_bytes, size_t slab_bytes = 0);

  // From now on acquires go by these plans, at first by that of plans[0]; without plans all is as at first. PoolBusy
  // naming the leases that lie in places of the plans before, ValueError as Arena: both with nothing changed.
  void adopt(std::vector<PoolPlan> plans, bool is_strict);
  void set_regime(const std::string& name);  // ValueError naming those that there are
  std::string regime() const;                // empty: no plans
  // The first acquire since adopt() that its plan had no place for, and why; empty: none, or somebody has taken the text.
  std::string take_divergence();
  // The step is over. LeaseLeak naming the leases of keys of the plans that are not meant to outlive it; of a strict
  // pool PlanDiverged if its order has not come to its end, in a regime that was begun. Both after all is set for the
  // next step.
  void end_step();

  // Records what happens to leases until end_trace(). PoolError when one is being recorded, or none.
  void begin_trace();
  PoolTrace end_trace();

  // The slab that contains [data, data + size_bytes) and the offset in it; null when it is not pool memory.
  // Cheap enough for every collective.
  struct Location {
    SlabRef slab;
    size_t offset_bytes = 0;
  };
  Location locate(const void* data, size_t size_bytes) const;

  Device& device() const;
  bool is_poisoned() const;
  size_t align_bytes() const;
  PoolStats stats() const;
  // Verifies every invariant (no overlap, sums match, alignment, coalescing, red zones); PoolError names the first
  // broken one.
  void check() const;
  // LeaseLeak naming the keys that are live.
  void expect_no_leases() const;
  // Returns the slabs without leases to the system, after waiting for their fences. Returns the number of bytes.
  size_t trim();

 private:
  std::shared_ptr<PoolImpl> impl_;
};
using PoolRef = std::shared_ptr<Pool>;

}  // namespace bucketwheel
