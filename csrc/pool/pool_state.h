// What Pool and Lease share: internal to csrc/pool.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "base/fork.h"
#include "pool/free_list.h"
#include "pool/pool.h"

namespace bucketwheel {

// One live period. Owns the slab, so the bytes stay mapped as long as anything refers to it.
struct Lease::State {
  std::shared_ptr<Pool::Impl> pool;
  std::string key;
  size_t size_bytes = 0;

  FreeList::Block* block = nullptr;  // the pool's while live
  SlabRef slab;
  size_t offset_bytes = 0;
  size_t block_bytes = 0;
  std::byte* data = nullptr;

  // Fences that the acquirer's stream waits for and the host does not: [Note: reuse under fences].
  std::vector<Fence> inherited;
  std::atomic<bool> is_live{false};  // from the moment it has a block
  std::atomic<bool> is_red_zone_set{false};

  // Ends the lease. False when it had ended before. Reports a damaged red zone in `fault`.
  bool end(EventRef after, bool is_dropped, std::string* fault);

  // On CUDA: what it was acquired in, and where a drop without release() is taken to happen.
  StreamRef home;

  // Enqueues the poison in `stream`; without one the bytes are poisoned on return.
  void fill_poison(bool with_red_zone, Stream* stream);
  std::string find_red_zone_fault() const;
  std::string describe() const;
};

struct Pool::Impl {
  Impl(Device& device, UpstreamRef upstream, PoolOptions options);
  ~Impl();  // waits a while for the fences; memory still in use after that is leaked, never unmapped
  static std::shared_ptr<Impl> make(Device& device, UpstreamRef upstream, PoolOptions options);

  void expect_same_process() const;
  bool is_foreign() const noexcept { return process.is_foreign(); }
  void grow(size_t block_bytes);
  // Takes a block for `state` and returns the events that its bytes still wait for. `is_captured`: for a stream that
  // is being captured; CaptureError, with nothing changed, where the pool would have to grow or there are such
  // events.
  std::vector<EventRef> take(Lease::State& state, bool is_captured);
  std::string list_live_keys() const;  // with the lock held

  struct KeyHash {
    using is_transparent = void;
    size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
    size_t operator()(const Lease::State* state) const { return (*this)(state->key); }
  };
  struct KeyEqual {
    using is_transparent = void;
    static std::string_view key_of(std::string_view key) { return key; }
    static std::string_view key_of(const Lease::State* state) { return state->key; }
    bool operator()(const auto& a, const auto& b) const { return key_of(a) == key_of(b); }
  };

  Device& device;
  const UpstreamRef upstream;
  const PoolOptions options;
  const MadeIn process;

  std::mutex growth_mutex;  // held while a slab is allocated; taken before `mutex`
  mutable std::mutex mutex;
  FreeList blocks;
  std::map<const std::byte*, SlabRef> slabs;  // by address
  std::unordered_set<Lease::State*, KeyHash, KeyEqual> live_keys;
  PoolStats stats;
};

}  // namespace bucketwheel
