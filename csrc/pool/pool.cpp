#include "pool/pool.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/env.h"
#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/pool_impl.h"

namespace bucketwheel {
namespace {

// Larger requests are mistakes (a negative size, an overflow); no address space holds them.
constexpr size_t kMaxLeaseBytes = size_t{1} << 46;
constexpr size_t kMaxAlignBytes = 4096;  // slabs are page aligned

std::vector<EventRef> events_of(const std::vector<Fence>& fences) {
  std::vector<EventRef> events;
  for (const Fence& fence : fences) {
    events.push_back(fence.event);
  }
  return events;
}

constexpr const char* kNotDone =
    "earlier work on these bytes is not done, and a graph cannot wait for work outside of it";

bool has_pending(const std::vector<Fence>& fences) {
  return std::ranges::any_of(fences, [](const Fence& fence) { return !fence.event->query(); });
}

[[noreturn]] void refuse_captured(const std::string& key, size_t size_bytes, const char* why) {
  throw CaptureError("acquire of key '" + key + "' (" + std::to_string(size_bytes) +
                     " bytes) while a CUDA graph is captured in its stream: " + why +
                     "; acquire it before the capture");
}

// Keeps the slab mapped until the process ends: unmapping memory that a stream still uses would be a crash.
void leak(const SlabRef& slab, const char* why) {
  std::fprintf(stderr, "[bucketwheel] slab %u (%zu bytes) is still in use, so it is leaked: %s\n", slab->id,
               slab->size_bytes, why);
  new SlabRef(slab);
}

}  // namespace

void PoolImpl::leak_unless_done(const SlabRef& slab, const std::vector<EventRef>& events, const Deadline& deadline) {
  try {
    for (const EventRef& event : events) {
      if (!event->synchronize(deadline)) {
        leak(slab, "its last uses did not complete in 5 s");
        return;
      }
    }
  } catch (const Error& error) {
    leak(slab, error.what());
  }
}

// [Note: reuse under fences]
// A release gives the bytes back at once, with a *fence*: the event of their last use. The next owner of any of these
// bytes waits for it: its stream if it names one (the host goes on), else the host. The choice of a block looks at
// sizes and offsets only; a fence that is already done is dropped, which saves a wait and changes nothing else. So
// offsets depend on the order of calls alone, and ranks that make the same calls get the same offsets.
//
// A stream may still be waiting for inherited fences when its lease ends. If the lease ends with an event, that event
// comes behind these waits and replaces them. If it ends without one (never used, or dropped), the inherited fences
// are kept: otherwise the next owner could write while the owner before the last still reads.

PoolImpl::PoolImpl(Device& device, UpstreamRef upstream, PoolOptions options)
    : device(device), upstream(std::move(upstream)), options(options) {}

PoolImpl::~PoolImpl() {
  // An open fence is rare here, because handles keep the leases of running operations: somebody released with an event
  // and kept neither lease nor handle.
  const Deadline deadline = deadline_in(5.0);
  for (const auto& [id, span] : blocks.spans()) {
    for (const FreeList::Block* block = span.first; block != nullptr; block = block->next) {
      leak_unless_done(span.slab, events_of(block->fences), deadline);
    }
  }
  if (arena != nullptr) {
    leak_unless_done(arena_slab, arena->all_events(), deadline);
  }
}

void PoolImpl::expect_same_process() const {
  if (is_foreign()) {
    throw PoolError(
        "the pool belongs to the parent process and cannot be used after fork(): make a new one in the child, or start "
        "it with the 'spawn' method");
  }
}

std::shared_ptr<Pool> Pool::make(Device& device, UpstreamRef upstream, PoolOptions options) {
  BW_EXPECTS(upstream != nullptr, "a pool needs an upstream");
  BW_EXPECTS(is_power_of_two(options.align_bytes) && options.align_bytes <= kMaxAlignBytes,
             "align_bytes must be a power of two of at most 4096, got " + std::to_string(options.align_bytes));
  BW_EXPECTS(options.min_slab_bytes <= kMaxLeaseBytes,
             "min_slab_bytes is out of range: " + std::to_string(options.min_slab_bytes));
  options.poison = options.poison || env().pool_poison;
  // In a forked child the pool is leaked as it is: another thread may have been changing it at the fork.
  return std::make_shared<Pool>(
      std::shared_ptr<PoolImpl>(new PoolImpl(device, std::move(upstream), options), [](PoolImpl* impl) {
        if (!impl->is_foreign()) {
          delete impl;
        }
      }));
}

size_t PoolImpl::block_bytes_of(size_t size_bytes) const {
  // A lease of 0 bytes takes one unit too: its address is its own.
  return round_up(std::max<size_t>(size_bytes, 1), options.align_bytes) + (options.poison ? options.align_bytes : 0);
}

void PoolImpl::grow(size_t block_bytes, size_t min_slab_bytes) {
  // One thread allocates; the others use what it brings. Outside `mutex`: the upstream may call locate().
  std::lock_guard growth(growth_mutex);
  {
    std::lock_guard lock(mutex);
    if (blocks.can_take(block_bytes)) {
      return;
    }
  }
  SlabRef slab = allocate(std::max(block_bytes, min_slab_bytes));
  std::lock_guard lock(mutex);
  enter(slab);
  blocks.add(std::move(slab));
}

// With the lock held.
void PoolImpl::enter(const SlabRef& slab) {
  slabs.emplace(slab->data, slab);
  stats.slabs += 1;
  stats.allocations += 1;
  stats.reserved_bytes += slab->size_bytes;
}

void PoolImpl::leave(const SlabRef& slab) {
  slabs.erase(slab->data);
  stats.slabs -= 1;
  stats.reserved_bytes -= slab->size_bytes;
}

SlabRef PoolImpl::allocate(size_t size_bytes) {
  // Whole blocks only: every block of the pool starts at a multiple of align_bytes.
  SlabRef slab = upstream->allocate(round_up(size_bytes, options.align_bytes));
  BW_EXPECTS(reinterpret_cast<uintptr_t>(slab->data) % options.align_bytes == 0,
             "the upstream gave a slab that is not aligned to " + std::to_string(options.align_bytes) + " bytes");
  return slab;
}

std::vector<EventRef> PoolImpl::take(Lease::State& state, bool is_captured) {
  bool is_reused = false;
  std::vector<Fence> dropped;  // before the lock, so destroyed after it: a fence may own the last handle on a lease
  std::vector<EventRef> done;  // likewise
  std::vector<EventRef> events;
  std::unique_lock lock(mutex);
  Arena::Key* known = expect_not_busy(state);
  if (arena != nullptr && (state.place = find_place(state, known)) != nullptr) {
    events = arena->open_events(*state.place, &done);
    if (is_captured && !events.empty()) {
      state.place = nullptr;
      refuse_captured(state.key, state.size_bytes, kNotDone);
    }
    is_reused = arena->take(*state.place, &state);
    positions[regime] += is_strict ? 1 : 0;
    state.planned_key = known;
    known->owner = &state;
    state.slab = arena_slab;
    state.block_bytes = state.place->planned->size_bytes;
    state.offset_bytes = state.place->planned->offset_bytes;
  } else {
    while ((state.block = blocks.try_take(state.block_bytes, &is_reused)) == nullptr) {
      if (is_captured) {
        refuse_captured(state.key, state.size_bytes, "the pool would have to grow");
      }
      lock.unlock();
      grow(state.block_bytes, options.min_slab_bytes);
      lock.lock();
      expect_not_busy(state);
    }
    if (is_captured && has_pending(state.block->fences)) {
      blocks.give(std::exchange(state.block, nullptr));
      refuse_captured(state.key, state.size_bytes, kNotDone);
    }
    FreeList::Block& block = *state.block;
    block.owner = &state;
    state.slab = block.span->slab;
    state.offset_bytes = block.offset_bytes;
    if (!state.key.empty()) {
      live_keys.emplace(state.key, &state);
    }
    for (Fence& fence : block.fences) {
      if (fence.event->query()) {
        dropped.push_back(std::move(fence));
        continue;
      }
      if (events.empty() || events.back() != fence.event) {
        events.push_back(fence.event);
      }
      state.inherited.push_back(std::move(fence));
    }
    block.fences.clear();
  }
  state.data = state.slab->data + state.offset_bytes;
  state.is_live.store(true, std::memory_order_release);
  stats.acquires += 1;
  stats.reuses += is_reused ? 1 : 0;
  stats.waits += events.size();
  count(state, true);
  if (trace != nullptr) {
    record(PoolTrace::Event::Kind::kAcquire, state, state.home.get());
  }
  return events;
}

LeaseRef Pool::acquire(std::string key, size_t size_bytes, const StreamRef& stream, std::string where) {
  impl_->expect_same_process();
  BW_EXPECTS(size_bytes <= kMaxLeaseBytes,
             "acquire of key '" + key + "': " + std::to_string(size_bytes) + " bytes is out of range");
  const PoolOptions& options = impl_->options;
  // Once it has its bytes, an exception gives them back with their fences.
  const auto lease = std::make_shared<Lease::State>(impl_);
  Lease::State& state = *lease;
  state.key = std::move(key);
  state.where = std::move(where);
  state.size_bytes = size_bytes;
  state.block_bytes = impl_->block_bytes_of(size_bytes);
  const bool is_captured = !impl_->is_on_host() && stream != nullptr && is_capturing(*stream);
  if (is_captured && options.poison) {
    refuse_captured(state.key, size_bytes, "every replay would write the poison again");
  }
  state.home = stream;
  const std::vector<EventRef> events = impl_->take(state, is_captured);
  for (const EventRef& event : events) {
    if (stream != nullptr) {
      stream->wait(event);
    } else {
      event->synchronize();
    }
  }
  if (stream == nullptr && !events.empty()) {
    state.inherited.clear();
    std::lock_guard lock(impl_->mutex);
    impl_->stats.host_waits += 1;
  }
  if (options.poison) {
    Stream* const behind = impl_->is_on_host() && events.empty() ? nullptr : stream.get();
    state.fill_poison(true, behind);
    if (behind != nullptr) {
      state.inherited.assign(1, {state.offset_bytes, state.offset_bytes + state.block_bytes, behind->record()});
    }
    state.is_red_zone_set.store(true, std::memory_order_release);
  }
  return lease;
}

void Pool::reserve(size_t size_bytes, size_t slab_bytes) {
  impl_->expect_same_process();
  BW_EXPECTS(std::max(size_bytes, slab_bytes) <= kMaxLeaseBytes, "reserve of " + std::to_string(size_bytes) +
                                                                     " bytes in slabs of " +
                                                                     std::to_string(slab_bytes) + " is out of range");
  impl_->grow(impl_->block_bytes_of(size_bytes), impl_->block_bytes_of(slab_bytes));
}

Pool::Location Pool::locate(const void* data, size_t size_bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->slabs.upper_bound(begin);
  if (it == impl_->slabs.begin()) {
    return {};
  }
  --it;
  const SlabRef& slab = it->second;
  const size_t offset = static_cast<size_t>(begin - slab->data);
  if (offset >= slab->size_bytes || size_bytes > slab->size_bytes - offset) {
    return {};
  }
  return {slab, offset};
}

Device& Pool::device() const { return impl_->device; }
bool Pool::is_poisoned() const { return impl_->options.poison; }
size_t Pool::align_bytes() const { return impl_->options.align_bytes; }

PoolStats Pool::stats() const {
  std::lock_guard lock(impl_->mutex);
  PoolStats stats = impl_->stats;
  stats.load_bytes = impl_->arena == nullptr ? 0 : impl_->arena->plans()[impl_->regime].load_bytes;
  return stats;
}

void Pool::check() const {
  std::lock_guard lock(impl_->mutex);
  std::string fault = impl_->blocks.find_fault(impl_->options.align_bytes);
  uint64_t live_bytes = 0;
  uint64_t live_leases = 0;
  impl_->for_each_live([&](const Lease::State& lease) {
    live_bytes += lease.block_bytes;
    live_leases += 1;
    if (fault.empty()) {
      fault = lease.find_fault();
    }
  });
  uint64_t reserved_bytes = 0;
  for (const auto& [data, slab] : impl_->slabs) {
    reserved_bytes += slab->size_bytes;
  }
  const PoolStats& stats = impl_->stats;
  const size_t slabs = impl_->blocks.spans().size() + (impl_->arena_slab == nullptr ? 0 : 1);
  if (fault.empty() &&
      (live_bytes != stats.live_bytes || live_leases != stats.live_leases || reserved_bytes != stats.reserved_bytes ||
       slabs != stats.slabs || impl_->slabs.size() != stats.slabs)) {
    fault = "the counters say " + std::to_string(stats.live_leases) + " leases, " + std::to_string(stats.live_bytes) +
            " bytes live, " + std::to_string(stats.reserved_bytes) + " reserved in " + std::to_string(stats.slabs) +
            " slabs; the slabs hold " + std::to_string(live_leases) + ", " + std::to_string(live_bytes) + ", " +
            std::to_string(reserved_bytes) + ", " + std::to_string(slabs);
  }
  if (!fault.empty()) {
    throw PoolError("pool check: " + fault);
  }
}

void PoolImpl::for_each_live(const std::function<void(Lease::State&)>& visit) const {
  for (const auto& [id, span] : blocks.spans()) {
    for (const FreeList::Block* block = span.first; block != nullptr; block = block->next) {
      if (!block->is_free) {
        visit(*static_cast<Lease::State*>(block->owner));
      }
    }
  }
  if (arena == nullptr) {
    return;
  }
  for (const Arena::Place& place : arena->places()) {
    auto* const owner = static_cast<Lease::State*>(arena->owner_of(place));
    if (owner != nullptr && owner->place == &place) {
      visit(*owner);
    }
  }
}

std::string PoolImpl::list(const std::vector<const Lease::State*>& leases) {
  constexpr size_t kListed = 16;
  std::string text;
  for (size_t i = 0; i < std::min(leases.size(), kListed); ++i) {
    const Lease::State& lease = *leases[i];
    text += (i == 0 ? "'" : ", '") + lease.key + "' (" + std::to_string(lease.size_bytes) + " bytes" +
            (lease.where.empty() ? ")" : ", acquired at " + lease.where + ")");
  }
  return leases.size() > kListed ? text + " and " + std::to_string(leases.size() - kListed) + " more" : text;
}

void Pool::expect_no_leases() const {
  std::lock_guard lock(impl_->mutex);
  if (impl_->stats.live_leases != 0) {
    std::vector<const Lease::State*> live;
    impl_->for_each_live([&live](const Lease::State& lease) { live.push_back(&lease); });
    throw LeaseLeak(std::to_string(live.size()) + " leases are live: " + PoolImpl::list(live));
  }
}

size_t Pool::trim() {
  impl_->expect_same_process();
  std::vector<std::pair<SlabRef, std::vector<Fence>>> removed;
  size_t freed_bytes = 0;
  {
    std::lock_guard lock(impl_->mutex);
    removed = impl_->blocks.remove_unused();
    for (const auto& [slab, fences] : removed) {
      impl_->leave(slab);
      freed_bytes += slab->size_bytes;
    }
  }
  // A host wait: unmapped memory must not be in use. Nobody else can get at these slabs any more.
  for (auto it = removed.begin(); it != removed.end(); ++it) {
    try {
      for (const Fence& fence : it->second) {
        fence.event->synchronize();
      }
    } catch (const Error& error) {
      for (; it != removed.end(); ++it) {
        leak(it->first, error.what());
      }
      throw;
    }
  }
  return freed_bytes;
}

void PoolImpl::count(const Lease::State& state, bool is_live) {
  const auto add = [&](uint64_t& bytes, uint64_t* most) {
    bytes += is_live ? state.block_bytes : -state.block_bytes;
    *most = std::max(*most, bytes);
  };
  stats.live_leases += is_live ? 1 : -1;
  add(stats.live_bytes, &stats.high_water_bytes);
  if (state.place != nullptr) {
    stats.planned_acquires += is_live ? 1 : 0;
    add(stats.planned_live_bytes, &stats.planned_high_water_bytes);
  } else if (state.is_side) {
    add(stats.side_live_bytes, &stats.side_high_water_bytes);
  }
}

void PoolImpl::record(PoolTrace::Event::Kind kind, Lease::State& state, Stream* stream, bool has_event) {
  if (state.number == 0) {
    trace->leases.push_back({state.key, state.size_bytes, state.where});
    state.number = trace->leases.size();
  }
  const void* const used = stream == nullptr || is_on_host() ? stream : native_stream(*stream, "a trace");
  trace->events.push_back({kind, has_event, state.number - 1, used});
}

void Pool::begin_trace() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->trace != nullptr) {
    throw PoolError("the pool is recording a trace already");
  }
  impl_->trace = std::make_unique<PoolTrace>();
  impl_->for_each_live(
      [this](Lease::State& lease) { impl_->record(PoolTrace::Event::Kind::kLive, lease, lease.home.get()); });
}

PoolTrace Pool::end_trace() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->trace == nullptr) {
    throw PoolError("the pool is not recording a trace");
  }
  impl_->for_each_live([](Lease::State& lease) { lease.number = 0; });
  return std::move(*std::exchange(impl_->trace, nullptr));
}

}  // namespace bucketwheel
