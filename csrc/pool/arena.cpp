#include "pool/arena.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

std::string describe(const PoolPlan& plan, const PlannedKey& key) {
  return "plan '" + plan.name + "': key '" + key.key + "' at [" + std::to_string(key.offset_bytes) + ", " +
         std::to_string(key.offset_bytes + key.size_bytes) + ")";
}

void expect_sound(const PoolPlan& plan, size_t align_bytes) {
  for (const PlannedKey& key : plan.keys) {
    BW_EXPECTS(key.size_bytes > 0 && key.offset_bytes % align_bytes == 0 && key.size_bytes % align_bytes == 0,
               describe(plan, key) + " is empty or not aligned to " + std::to_string(align_bytes));
    BW_EXPECTS(key.offset_bytes <= plan.total_bytes && key.size_bytes <= plan.total_bytes - key.offset_bytes,
               describe(plan, key) + " lies beyond its total of " + std::to_string(plan.total_bytes) + " bytes");
  }
  for (const uint32_t index : plan.order) {
    BW_EXPECTS(index < plan.keys.size(), "plan '" + plan.name + "': its order has key " + std::to_string(index) +
                                             " of " + std::to_string(plan.keys.size()));
  }
}

}  // namespace

Arena::Arena(std::vector<PoolPlan> plans, size_t align_bytes) : plans_(std::move(plans)) {
  std::vector<size_t> cuts;
  for (const PoolPlan& plan : plans_) {
    expect_sound(plan, align_bytes);
    total_bytes_ = std::max(total_bytes_, plan.total_bytes);
    for (const PlannedKey& key : plan.keys) {
      cuts.push_back(key.offset_bytes);
      cuts.push_back(key.offset_bytes + key.size_bytes);
    }
  }
  std::ranges::sort(cuts);
  cuts.erase(std::ranges::unique(cuts).begin(), cuts.end());
  cells_.resize(cuts.size());
  const auto cell_at = [&cuts](size_t offset) {
    return static_cast<size_t>(std::ranges::lower_bound(cuts, offset) - cuts.begin());
  };
  for (uint32_t regime = 0; regime < plans_.size(); ++regime) {
    const PoolPlan& plan = plans_[regime];
    BW_EXPECTS(std::ranges::count(plans_, plan.name, &PoolPlan::name) == 1, "two plans are called '" + plan.name + "'");
    for (uint32_t index = 0; index < plan.keys.size(); ++index) {
      const PlannedKey& key = plan.keys[index];
      std::vector<Place*>& places = keys_[key.key].places;
      places.resize(plans_.size());
      BW_EXPECTS(places[regime] == nullptr, describe(plan, key) + " has a second place");
      places_.push_back({&key, regime, index, cell_at(key.offset_bytes), cell_at(key.offset_bytes + key.size_bytes)});
      places[regime] = &places_.back();
    }
  }
}

Arena::Key* Arena::find(const std::string& key) {
  const auto found = keys_.find(key);
  return found == keys_.end() ? nullptr : &found->second;
}

void* Arena::owner_of(const Place& place) const {
  for (size_t i = place.first_cell; i < place.end_cell; ++i) {
    if (cells_[i].owner != nullptr) {
      return cells_[i].owner;
    }
  }
  return nullptr;
}

bool Arena::take(const Place& place, void* owner) {
  bool is_reused = false;
  for (size_t i = place.first_cell; i < place.end_cell; ++i) {
    cells_[i].owner = owner;
    is_reused |= std::exchange(cells_[i].was_taken, true);
  }
  return is_reused;
}

std::vector<EventRef> Arena::open_events(const Place& place, std::vector<EventRef>* done) {
  std::vector<EventRef> events;
  for (size_t i = place.first_cell; i < place.end_cell; ++i) {
    EventRef& event = cells_[i].event;
    if (event == nullptr || std::ranges::find(events, event) != events.end()) {
      continue;
    }
    if (!belongs_to_graph(*event) && event->query()) {
      done->push_back(std::move(event));
    } else {
      events.push_back(event);
    }
  }
  return events;
}

void Arena::give(const Place& place, const EventRef& event, std::vector<EventRef>* done) {
  for (size_t i = place.first_cell; i < place.end_cell; ++i) {
    Cell& cell = cells_[i];
    cell.owner = nullptr;
    if (event != nullptr) {
      if (cell.event != nullptr) {
        done->push_back(std::move(cell.event));
      }
      cell.event = event;
    }
  }
}

std::vector<EventRef> Arena::all_events() const {
  std::vector<EventRef> events;
  for (const Cell& cell : cells_) {
    if (cell.event != nullptr) {
      events.push_back(cell.event);
    }
  }
  return events;
}

}  // namespace bucketwheel
