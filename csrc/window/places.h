// Places: memory in which buffers take turns, each where a plan puts it.
//
// An Arena (pool/arena.h) over one lease of a communicator's pool. Users that keep to the order of the plan find the bytes
// of their place free. A user that comes in another order has memory on the *side*: a lease of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "pool/arena.h"
#include "pool/pool.h"

namespace bucketwheel {

constexpr int kPoison = 0xFF;  // NaN, as in pools

// One turn of one buffer: from enter() to leave().
struct Turn {
  std::byte* data = nullptr;  // null: no turn
  size_t size_bytes = 0;      // as pools count
  const Arena::Place* place = nullptr;
  std::shared_ptr<void> owner;  // of the bytes, for operations that may outlive the turn
  LeaseRef side;                // set where the turn is on the side, but for one that is captured
  explicit operator bool() const { return data != nullptr; }
};

// Not thread-safe.
class Places {
 public:
  // `pool`: of the places; `side`: of what finds none. The lease is made here, in `stream` (CUDA).
  Places(PoolRef pool, PoolRef side, PoolPlan plan, const StreamRef& stream);

  int count() const { return static_cast<int>(plan_.keys.size()); }
  const Lease* lease() const { return lease_.get(); }  // null: no byte is planned, or after release()
  bool is_free(int number) const { return arena_->owner_of(arena_->places()[static_cast<size_t>(number)]) == nullptr; }
  bool shares_bytes(int number, const Turn& turn) const;
  // The last place before `number` that has some of its bytes; -1: none.
  int last_sharing(int number) const { return last_sharing_[static_cast<size_t>(number)]; }

  // The place, which is free. `events`: the ends of the last uses of its bytes, for which the caller waits.
  Turn enter(int number, std::vector<EventRef>* events);
  // `stream` waits for the last use of the bytes. While a CUDA graph is captured in it, memory that is never given back.
  Turn enter_side(size_t size_bytes, const std::string& key, const StreamRef& stream);
  // `after`: the end of the last use of the bytes; null where all use has ended.
  void leave(Turn& turn, EventRef after);
  // Ends all turns in places, and forgets their ends: the next ones are in another CUDA graph, or in none. The memory's
  // uses are behind the caller's stream, or will never run.
  void forget();
  // Gives the lease back. `stream` (CUDA) is behind all uses but those of operations in flight, which keep it meanwhile.
  void release(const StreamRef& stream);

  size_t planned_bytes() const { return plan_.total_bytes; }
  size_t load_bytes() const { return plan_.load_bytes; }
  size_t live_bytes() const { return live_bytes_; }  // side_bytes() among them
  size_t side_bytes() const { return side_bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }
  size_t side_peak_bytes() const { return side_peak_bytes_; }

 private:
  void count(const Turn& turn, bool is_live);

  const PoolPlan plan_;
  const size_t plan_align_;
  const PoolRef side_;
  std::string name_;  // of leases
  LeaseRef lease_;
  std::byte* data_ = nullptr;
  std::unique_ptr<Arena> arena_;
  std::vector<int> last_sharing_;
  std::vector<std::shared_ptr<void>> captured_;  // of the side, for graphs
  size_t live_bytes_ = 0, side_bytes_ = 0, peak_bytes_ = 0, side_peak_bytes_ = 0;
};

}  // namespace bucketwheel
