// What a pool and its leases share. [Note: reuse under fences] in pool.cpp.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/fork.h"
#include "pool/arena.h"
#include "pool/free_list.h"
#include "pool/pool.h"

namespace bucketwheel {

// What a pool knows of a lease. Owns the slab, so the bytes stay mapped as long as anything refers to it.
struct LeaseRecord : Lease {
  std::shared_ptr<PoolImpl> pool;
  std::string key;
  size_t size_bytes = 0;

  // While it is live one of them is set: where it lies.
  FreeList::Block* block = nullptr;
  const Arena::Place* place = nullptr;
  Arena::Key* planned_key = nullptr;  // with `place`
  SlabRef slab;
  size_t offset_bytes = 0;
  size_t block_bytes = 0;
  std::byte* data = nullptr;

  // Fences that the acquirer's stream waits for and the host does not: [Note: reuse under fences].
  std::vector<Fence> inherited;
  bool is_side = false;  // its plan should have had a place for it, and had none
  size_t number = 0;     // of its entry in the trace that goes on, from 1; 0: it has none
  std::string where;     // the caller of acquire, if the caller said so

  StreamRef home;                // what it was acquired in; on CUDA a drop without release() is taken to happen there
  std::vector<StreamRef> users;  // of Lease::use
};

// All that a Lease is: one allocation each.
struct Lease::State final : LeaseRecord {
  explicit State(std::shared_ptr<PoolImpl> pool) { this->pool = std::move(pool); }
  explicit State(LeaseRecord&& record) : LeaseRecord(std::move(record)) {}
  ~State();

  std::atomic<bool> is_live{false};  // from the moment it has a block
  std::atomic<bool> is_red_zone_set{false};
  std::atomic<bool> is_left{false};  // nobody will release it

  // Ends the lease. False when it had ended before. Reports a damaged red zone in `fault`.
  bool end(EventRef after, bool is_dropped, std::string* fault);
  // Another State, which is never destroyed, becomes the lease.
  void leave_behind();

  // Enqueues the poison in `stream`; without one the bytes are poisoned on return.
  void fill_poison(bool with_red_zone, Stream* stream);
  std::string find_red_zone_fault() const;
  std::string find_fault() const;  // with the pool's lock held
  std::string describe() const;
};

struct PoolImpl {
  PoolImpl(Device& device, UpstreamRef upstream, PoolOptions options);
  ~PoolImpl();  // waits a while for the fences; memory still in use after that is leaked, never unmapped

  void expect_same_process() const;
  bool is_foreign() const noexcept { return process.is_foreign(); }
  bool is_on_host() const { return device.id().kind == DeviceId::Kind::kCpu; }
  size_t block_bytes_of(size_t size_bytes) const;  // what a lease takes
  void grow(size_t block_bytes, size_t min_slab_bytes);
  SlabRef allocate(size_t size_bytes);  // without the lock
  void enter(const SlabRef& slab);      // with it, as leave()
  void leave(const SlabRef& slab);
  // Takes a block for `state` and returns the events that its bytes still wait for. `is_captured`: for a stream that
  // is being captured; CaptureError, with nothing changed, where the pool would have to grow or there are such
  // events.
  std::vector<EventRef> take(Lease::State& state, bool is_captured);

  // Waits for the events of the last uses of `slab`, which nobody acquires any more; gives it up where that fails.
  static void leak_unless_done(const SlabRef& slab, const std::vector<EventRef>& events, const Deadline& deadline);

  // All below with the lock held.
  // What the plans have of the lease's key; null: nothing. KeyBusy when a lease of the key is live.
  Arena::Key* expect_not_busy(const Lease::State& state) const;
  // The place that the plan has for the lease. Null where that cannot be had: the lease then lies elsewhere. In a strict
  // pool UnknownKey, SizeExceedsPlan or PlanDiverged instead.
  const Arena::Place* find_place(Lease::State& state, const Arena::Key* known);
  std::string describe_step(size_t of_regime) const;  // strict: what has followed the plan, and what it expects next
  void count(const Lease::State& state, bool is_live);
  void record(PoolTrace::Event::Kind kind, Lease::State& state, Stream* stream, bool has_event = false);
  void for_each_live(const std::function<void(Lease::State&)>& visit) const;
  static std::string list(const std::vector<const Lease::State*>& leases);

  Device& device;
  const UpstreamRef upstream;
  const PoolOptions options;
  const MadeIn process;

  std::mutex growth_mutex;  // held while a slab is allocated; taken before `mutex`
  mutable std::mutex mutex;
  FreeList blocks;
  std::map<const std::byte*, SlabRef> slabs;                      // by address; that of the arena too
  std::unordered_map<std::string_view, Lease::State*> live_keys;  // of leases that lie in `blocks`, which own the keys
  PoolStats stats;

  // Of the adopted plans; null before the first. Exchanged as a whole, while no lease lies in it.
  std::unique_ptr<Arena> arena;
  SlabRef arena_slab;  // null: no byte is planned
  bool is_strict = false;
  size_t regime = 0;              // in arena->plans(): the one that acquires go by
  std::vector<size_t> positions;  // by regime: how many acquires of this step have followed its order; of strict pools
  std::string divergence;         // the first acquire since adopt() that its plan had no place for
  std::atomic<bool> is_divergence_new{false};  // from then on, until take_divergence()
  // What the trace that goes on has recorded; null: none does.
  std::unique_ptr<PoolTrace> trace;
};

}  // namespace bucketwheel
