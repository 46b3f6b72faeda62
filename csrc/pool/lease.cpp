#include "pool/lease.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/error.h"
#include "pool/pool_state.h"

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
  // The flag is set after `inherited`, which from then on says whether the red zone has been written.
  if (!is_red_zone_set.load(std::memory_order_acquire) ||
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
  const bool keeps_inherited = after == nullptr;
  const bool has_fences = is_pending || (keeps_inherited && !inherited.empty());
  if (pool->options.poison && !has_fences) {
    fill_poison(false, nullptr);  // otherwise the next acquire does it, behind the fences
  }
  std::vector<Fence> fences;
  if (is_pending) {
    fences.push_back({offset_bytes, offset_bytes + block_bytes, std::move(after)});
  }
  std::lock_guard lock(pool->mutex);
  if (keeps_inherited) {
    fences = std::move(inherited);  // under the lock: Pool::check() reads them, also of leases that are ending
  }
  if (!key.empty()) {
    pool->live_keys.erase(this);
  }
  PoolStats& stats = pool->stats;
  stats.live_bytes -= block_bytes;
  stats.live_leases -= 1;
  stats.dropped_leases += is_dropped ? 1 : 0;
  block->fences = std::move(fences);
  pool->blocks.give(std::exchange(block, nullptr));
  return true;
}

Lease::Lease(std::shared_ptr<State> state) : state_(std::move(state)) {}

Lease::~Lease() {
  // In a forked child the lease is the parent's.
  if (!is_live() || state_->pool->is_foreign()) {
    return;
  }
  try {
    std::string fault;
    // On CUDA a drop says nothing about the device: the last use is in the stream of the acquire, or an operation's
    // handle would hold the lease.
    state_->end(state_->home != nullptr ? state_->home->record() : nullptr, true, &fault);
    if (!fault.empty()) {
      std::fprintf(stderr, "[bucketwheel] %s\n", fault.c_str());
    }
  } catch (const std::exception& error) {
    // Where its stream is being captured, replays will use the bytes. The pool's block refers to the state.
    std::fprintf(stderr, "[bucketwheel] dropping lease '%s', which stays live: %s\n", state_->key.c_str(),
                 error.what());
    new std::shared_ptr<State>(state_);
  }
}

const std::string& Lease::key() const { return state_->key; }
size_t Lease::size_bytes() const { return state_->size_bytes; }
const SlabRef& Lease::slab() const { return state_->slab; }
DeviceId Lease::device() const { return state_->pool->device.id(); }
size_t Lease::offset_bytes() const { return state_->offset_bytes; }
bool Lease::is_live() const { return state_->is_live.load(std::memory_order_acquire); }

std::byte* Lease::data() const {
  if (!is_live()) {
    throw UseAfterRelease(state_->describe() + " was released: its bytes may belong to another lease");
  }
  return state_->data;
}

void Lease::release(EventRef after) {
  state_->pool->expect_same_process();
  std::string fault;
  if (!state_->end(std::move(after), false, &fault)) {
    throw ReleasedTwice(state_->describe() + " was released before");
  }
  if (!fault.empty()) {
    throw PoolError(fault);
  }
}

}  // namespace bucketwheel
