#include "window/places.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/align.h"
#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

constexpr size_t kLeastSideSlabBytes = size_t{1} << 20;  // small turns on the side share one

bool overlap(const Arena::Place& a, const Arena::Place& b) {
  return a.first_cell < b.end_cell && b.first_cell < a.end_cell;
}

}  // namespace

Places::Places(PoolRef pool, PoolRef side, PoolPlan plan, const StreamRef& stream)
    : plan_(std::move(plan)), plan_align_(pool->align_bytes()), side_(std::move(side)) {
  static std::atomic<uint64_t> number{0};  // leases that operations in flight hold may outlive their places
  name_ = plan_.name + " " + std::to_string(number++);
  arena_ = std::make_unique<Arena>(std::vector<PoolPlan>{plan_}, plan_align_);
  for (int i = 0; i < count(); ++i) {
    int before = i - 1;
    while (before >= 0 &&
           !overlap(arena_->places()[static_cast<size_t>(i)], arena_->places()[static_cast<size_t>(before)])) {
      --before;
    }
    last_sharing_.push_back(before);
  }
  if (plan_.total_bytes != 0) {
    pool->reserve(plan_.total_bytes);
    lease_ = pool->acquire(name_, plan_.total_bytes, stream);
    data_ = lease_->data();
  }
}

bool Places::shares_bytes(int number, const Turn& turn) const {
  return turn.place != nullptr && overlap(arena_->places()[static_cast<size_t>(number)], *turn.place);
}

Turn Places::enter(int number, std::vector<EventRef>* events) {
  const Arena::Place& place = arena_->places()[static_cast<size_t>(number)];
  std::vector<EventRef> done;
  *events = arena_->open_events(place, &done);
  arena_->take(place, this);
  Turn turn{data_ + place.planned->offset_bytes, place.planned->size_bytes, &place, lease_, nullptr};
  count(turn, true);
  return turn;
}

Turn Places::enter_side(size_t size_bytes, const std::string& key, const StreamRef& stream) {
  Turn turn{nullptr, round_up(size_bytes, side_->align_bytes()), nullptr, nullptr, nullptr};
  if (stream != nullptr && is_capturing(*stream)) {
    CudaDevice& device = CudaDevice::at(side_->device().id().index);
    turn.owner = {device.allocate(turn.size_bytes), [&device](void* data) { device.free(data); }};
    turn.data = static_cast<std::byte*>(turn.owner.get());
    captured_.push_back(turn.owner);
  } else {
    size_t slab_bytes = kLeastSideSlabBytes;
    for (const PlannedKey& planned : plan_.keys) {
      slab_bytes = std::max(slab_bytes, planned.size_bytes);
    }
    side_->reserve(size_bytes, slab_bytes);
    turn.owner = turn.side = side_->acquire(key.empty() ? key : name_ + ", " + key, size_bytes, stream);
    turn.data = turn.side->data();
  }
  count(turn, true);
  return turn;
}

void Places::leave(Turn& turn, EventRef after) {
  if (!turn) {
    return;
  }
  count(turn, false);
  if (turn.side != nullptr) {
    turn.side->release(std::move(after));
  } else if (turn.place != nullptr) {
    std::vector<EventRef> done;
    arena_->give(*turn.place, after, &done);
  }
  turn = {};
}

void Places::forget() {
  arena_ = std::make_unique<Arena>(std::vector<PoolPlan>{plan_}, plan_align_);
  live_bytes_ = side_bytes_;
}

void Places::release(const StreamRef& stream) {
  if (lease_ == nullptr) {
    return;
  }
  if (live_bytes_ != side_bytes_) {  // operations in flight own the rest
    lease_->leave_to_owners();
  } else {
    for (const EventRef& event : arena_->all_events()) {
      stream != nullptr ? stream->wait(event) : (void)event->synchronize();
    }
    lease_->release(stream == nullptr ? nullptr : stream->record());
  }
  lease_ = nullptr;
  forget();
}

void Places::count(const Turn& turn, bool is_live) {
  const bool is_side = turn.place == nullptr;
  const size_t bytes = is_live ? turn.size_bytes : -turn.size_bytes;  // modulo 2^64
  live_bytes_ += bytes;
  side_bytes_ += is_side ? bytes : 0;
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
  side_peak_bytes_ = std::max(side_peak_bytes_, side_bytes_);
}

}  // namespace bucketwheel
