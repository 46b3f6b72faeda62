#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/pool_impl.h"

namespace bucketwheel {
namespace {

constexpr int kPoison = 0xFF;  // a NaN in every floating-point type
constexpr int kRedZone = 0xA5;

}  // namespace

std::string Lease::State::describe() const {
  return "lease '" + key + "' of " + std::to_string(size_bytes) + " bytes (slab " + std::to_string(slab->id) +
         ", offset " + std::to_string(offset_bytes) + ")";
}

void Lease::State::fill_poison(bool with_red_zone, Stream* stream) {
  pool->device.fill(data, kPoison, size_bytes, stream);
  if (with_red_zone) {
    pool->device.fill(data + size_bytes, kRedZone, block_bytes - size_bytes, stream);
  }
}

std::string Lease::State::find_red_zone_fault() const {
  // A place of a plan may end with the lease. The flag is set after `inherited`, which from then on says whether the red
  // zone has been written.
  if (size_bytes == block_bytes || !is_red_zone_set.load(std::memory_order_acquire) ||
      !std::all_of(inherited.begin(), inherited.end(), [](const Fence& fence) { return fence.event->query(); })) {
    return {};
  }
  std::vector<std::byte> zone(block_bytes - size_bytes);
  pool->device.read(zone.data(), data + size_bytes, zone.size());
  for (size_t i = 0; i < zone.size(); ++i) {
    if (zone[i] != std::byte{kRedZone}) {
      return describe() + ": bytes past its end were written, the first at offset " + std::to_string(size_bytes + i) +
             " from its start";
    }
  }
  return {};
}

bool Lease::State::end(EventRef after, bool is_dropped, std::string* fault) {
  const bool is_pending = after != nullptr && !after->query();  // may throw, so before anything changes
  if (pool->options.poison && is_live) {
    *fault = find_red_zone_fault();  // while `inherited` is there
  }
  if (!is_live.exchange(false, std::memory_order_acq_rel)) {
    return false;
  }
  const bool has_event = after != nullptr;  // else `inherited` is kept
  const bool has_fences = is_pending || (!has_event && !inherited.empty());
  if (pool->options.poison && !has_fences) {
    fill_poison(false, nullptr);  // otherwise the next acquire does it, behind the fences
  }
  std::vector<Fence> fences;
  if (is_pending) {
    fences.push_back({offset_bytes, offset_bytes + block_bytes, std::move(after)});
  }
  std::vector<EventRef> before;  // before the lock, so destroyed after it
  std::lock_guard lock(pool->mutex);
  if (pool->trace != nullptr && number != 0) {
    pool->record(PoolTrace::Event::Kind::kRelease, *this, home.get(), has_event);
  }
  if (!has_event) {
    fences = std::move(inherited);  // under the lock: Pool::check() reads them, also of leases that are ending
  }
  pool->stats.dropped_leases += is_dropped && !is_left ? 1 : 0;
  pool->count(*this, false);
  if (place != nullptr) {
    // Its cells have kept what it inherited.
    pool->arena->give(*place, fences.empty() ? nullptr : fences.front().event, &before);
    std::exchange(planned_key, nullptr)->owner = nullptr;
    place = nullptr;
    return true;
  }
  if (!key.empty()) {
    pool->live_keys.erase(key);
  }
  block->fences = std::move(fences);
  pool->blocks.give(std::exchange(block, nullptr));
  return true;
}

std::string Lease::State::find_fault() const {
  const bool is_sound = place != nullptr ? data == slab->data + place->planned->offset_bytes
                                         : block->owner == this && data == slab->data + block->offset_bytes &&
                                               block_bytes == block->size_bytes;
  return is_sound ? find_red_zone_fault() : describe() + " does not match its block";
}

Lease::State::~State() {
  // In a forked child the lease is the parent's.
  if (!is_live || pool->is_foreign()) {
    return;
  }
  try {
    std::string fault;
    // On CUDA a drop says nothing about the device: the last use is in the stream of the acquire or of use(), or an
    // operation's handle would hold the lease.
    end(end_of_use(pool->is_on_host() ? nullptr : home), true, &fault);
    if (!fault.empty()) {
      std::fprintf(stderr, "[bucketwheel] %s\n", fault.c_str());
    }
  } catch (const std::exception& error) {
    // Where its stream is being captured, replays will use the bytes.
    std::fprintf(stderr, "[bucketwheel] lease '%s' was dropped but stays live: %s\n", key.c_str(), error.what());
    leave_behind();
  }
}

void Lease::State::leave_behind() {
  PoolImpl& owner = *pool;
  const std::lock_guard lock(owner.mutex);
  if (block != nullptr && !key.empty()) {
    owner.live_keys.erase(key);
  }
  auto* const heir = new State(static_cast<LeaseRecord&&>(*this));
  heir->is_live = true;
  heir->is_red_zone_set = is_red_zone_set.load();
  if (heir->place != nullptr) {
    owner.arena->take(*heir->place, heir);
    heir->planned_key->owner = heir;
    return;
  }
  heir->block->owner = heir;
  if (!heir->key.empty()) {
    owner.live_keys.emplace(heir->key, heir);
  }
}

Lease::State& Lease::state() { return static_cast<State&>(*this); }
const Lease::State& Lease::state() const { return static_cast<const State&>(*this); }

const std::string& Lease::key() const { return state().key; }
size_t Lease::size_bytes() const { return state().size_bytes; }
const SlabRef& Lease::slab() const { return state().slab; }
DeviceId Lease::device() const { return state().pool->device.id(); }
size_t Lease::offset_bytes() const { return state().offset_bytes; }
bool Lease::is_live() const { return state().is_live.load(std::memory_order_acquire); }

void Lease::leave_to_owners() { state().is_left = true; }

void Lease::use(const StreamRef& stream) {
  BW_EXPECTS(stream != nullptr, state().describe() + ": use() needs a stream");
  (void)data();  // UseAfterRelease
  if (state().home != nullptr && state().home != stream) {
    stream->wait(state().home->record());
  }
  std::lock_guard lock(state().pool->mutex);
  state().users.push_back(stream);
  if (state().pool->trace != nullptr && state().number != 0) {
    state().pool->record(PoolTrace::Event::Kind::kUse, state(), stream.get());
  }
}

EventRef Lease::end_of_use(StreamRef stream) const {
  for (const StreamRef& user : state().users) {
    if (stream == nullptr) {
      stream = user;
    } else if (stream != user) {
      stream->wait(user->record());
    }
  }
  return stream == nullptr ? nullptr : stream->record();
}

std::byte* Lease::data() const {
  if (!is_live()) {
    throw UseAfterRelease(state().describe() + " was released: its bytes may belong to another lease");
  }
  return state().data;
}

void Lease::release(EventRef after) {
  state().pool->expect_same_process();
  std::string fault;
  if (!state().end(std::move(after), false, &fault)) {
    throw ReleasedTwice(state().describe() + " was released before");
  }
  if (!fault.empty()) {
    throw PoolError(fault);
  }
}

}  // namespace bucketwheel
