// Arena: one slab in which every key of the adopted plans has its place.
//
// Several plans (*regimes*: train, eval) share it; a place belongs to one of them. The cuts of all places divide the slab
// into *cells*: a place is a run of whole cells, and a cell knows the lease that has it and the event of its last use. So
// no two leases share a byte, whether of two regimes or of a step that leaves its plan.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/event.h"
#include "pool/plan.h"
#include "pool/upstream.h"

namespace bucketwheel {

class Arena {
 public:
  struct Place {
    const PlannedKey* planned = nullptr;
    uint32_t regime = 0;  // the index of its plan
    uint32_t index = 0;   // in the keys of that
    size_t first_cell = 0;
    size_t end_cell = 0;
  };
  struct Key {
    std::vector<Place*> places;  // by regime; null: that plan does not have it
    void* owner = nullptr;       // the lease of this key that is live, in its place or elsewhere; set by the pool
  };

  // ValueError for a place that is not aligned, empty or beyond the total, a key that has two, an order of other keys,
  // and for two plans of one name.
  Arena(std::vector<PoolPlan> plans, size_t align_bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const std::vector<PoolPlan>& plans() const { return plans_; }
  size_t total_bytes() const { return total_bytes_; }
  Key* find(const std::string& key);  // null: no plan has it

  void* owner_of(const Place& place) const;    // who has any of its bytes, or null
  bool take(const Place& place, void* owner);  // whether some of its bytes were taken before
  // The events of the last users of its bytes, each once; but for those that are done, which move to `done`: the caller
  // destroys them outside of its locks.
  std::vector<EventRef> open_events(const Place& place, std::vector<EventRef>* done);
  // Ends the owner's lease. `event`: of its last use, behind all that its bytes waited for, in exchange for the events
  // before it, which move to `done`. Null: the bytes still wait for those.
  void give(const Place& place, const EventRef& event, std::vector<EventRef>* done);

  const std::deque<Place>& places() const { return places_; }  // regime by regime
  std::vector<EventRef> all_events() const;

 private:
  struct Cell {
    void* owner = nullptr;
    EventRef event;
    bool was_taken = false;
  };

  const std::vector<PoolPlan> plans_;
  size_t total_bytes_ = 0;
  std::vector<Cell> cells_;
  std::deque<Place> places_;
  std::unordered_map<std::string, Key> keys_;
};

}  // namespace bucketwheel
