#include "pool/pool.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/align.h"
#include "base/env.h"
#include "base/error.h"
#include "device/device_cuda.h"
#include "pool/pool_state.h"

namespace bucketwheel {
namespace {

// Larger requests are mistakes (a negative size, an overflow); no address space holds them.
constexpr size_t kMaxLeaseBytes = size_t{1} << 46;
constexpr size_t kMaxAlignBytes = 4096;  // slabs are page aligned

bool wait_for(const std::vector<Fence>& fences, const Deadline& deadline) {
  for (const Fence& fence : fences) {
    if (!fence.event->synchronize(deadline)) {
      return false;
    }
  }
  return true;
}

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
  std::fprintf(stderr, "[bucketwheel] slab %u (%zu bytes) is given up while in use, and leaked: %s\n", slab->id,
               slab->size_bytes, why);
  new SlabRef(slab);
}

}  // namespace

// [Note: reuse under fences]
// A release gives the bytes back at once, with a *fence*: the event of their last use. The next owner of any of those
// bytes waits for it: its stream if it names one (the host goes on), else the host. The choice of a block looks at
// sizes and offsets only. A fence that happens to be done is dropped, which saves a wait and changes nothing else. So
// offsets depend on the order of calls alone, and ranks that make the same calls get the same offsets.
//
// An acquirer's stream may still be waiting when its lease ends. If the lease ends with an event, that event stands
// for a use that came behind the stream's waits, and it replaces them. If it ends without one (never used, or
// dropped), the fences it inherited are kept: without that, the next owner could write while the owner before the
// last still reads.

Pool::Impl::Impl(Device& device, UpstreamRef upstream, PoolOptions options)
    : device(device), upstream(std::move(upstream)), options(options) {}

std::shared_ptr<Pool::Impl> Pool::Impl::make(Device& device, UpstreamRef upstream, PoolOptions options) {
  // In a forked child the pool is leaked as it is: another thread may have been changing it at the fork.
  return std::shared_ptr<Impl>(new Impl(device, std::move(upstream), options), [](Impl* impl) {
    if (!impl->is_foreign()) {
      delete impl;
    }
  });
}

Pool::Impl::~Impl() {
  // Handles keep the leases of running operations, so a fence that is open here is rare: somebody released with an
  // event and kept nothing.
  const Deadline deadline = deadline_in(5.0);
  for (const auto& [id, span] : blocks.spans()) {
    for (const FreeList::Block* block = span.first; block != nullptr; block = block->next) {
      try {
        if (!wait_for(block->fences, deadline)) {
          leak(span.slab, "its fences did not complete in 5 s");
        }
      } catch (const Error& error) {
        leak(span.slab, error.what());
      }
    }
  }
}

void Pool::Impl::expect_same_process() const {
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
  return std::shared_ptr<Pool>(new Pool(device, std::move(upstream), options));
}

Pool::Pool(Device& device, UpstreamRef upstream, PoolOptions options)
    : impl_(Impl::make(device, std::move(upstream), options)) {}

Pool::~Pool() = default;

void Pool::Impl::grow(size_t block_bytes) {
  // One thread allocates; the others use what it brings. Outside `mutex`: the upstream may call locate().
  std::lock_guard growth(growth_mutex);
  {
    std::lock_guard lock(mutex);
    if (blocks.can_take(block_bytes)) {
      return;
    }
  }
  // Whole blocks only: every block of the pool starts at a multiple of align_bytes.
  SlabRef slab = upstream->allocate(round_up(std::max(block_bytes, options.min_slab_bytes), options.align_bytes));
  BW_EXPECTS(reinterpret_cast<uintptr_t>(slab->data) % options.align_bytes == 0,
             std::string("upstream '") + upstream->name() + "' gave a slab that is not aligned to " +
                 std::to_string(options.align_bytes) + " bytes");
  std::lock_guard lock(mutex);
  slabs.emplace(slab->data, slab);
  stats.slabs += 1;
  stats.reserved_bytes += slab->size_bytes;
  blocks.add(std::move(slab));
}

std::vector<EventRef> Pool::Impl::take(Lease::State& state, bool is_captured) {
  bool is_reused = false;
  std::vector<Fence> dropped;  // before the lock, so destroyed after it: a fence may own the last handle on a lease
  std::unique_lock lock(mutex);
  for (;;) {
    if (!state.key.empty()) {
      const auto holder = live_keys.find(std::string_view(state.key));
      if (holder != live_keys.end()) {
        throw KeyBusy("acquire of key '" + state.key + "' (" + std::to_string(state.size_bytes) +
                      " bytes): the key is held by a live " + (*holder)->describe());
      }
    }
    state.block = blocks.try_take(state.block_bytes, &is_reused);
    if (state.block != nullptr) {
      break;
    }
    if (is_captured) {
      refuse_captured(state.key, state.size_bytes, "the pool would have to grow");
    }
    lock.unlock();
    grow(state.block_bytes);
    lock.lock();
  }
  if (is_captured && has_pending(state.block->fences)) {
    blocks.give(std::exchange(state.block, nullptr));
    refuse_captured(state.key, state.size_bytes,
                    "the last users of these bytes are not done, and a graph cannot wait for what is outside");
  }
  FreeList::Block& block = *state.block;
  block.owner = &state;
  state.slab = block.span->slab;
  state.offset_bytes = block.offset_bytes;
  state.data = state.slab->data + block.offset_bytes;
  state.is_live.store(true, std::memory_order_release);
  stats.acquires += 1;
  stats.reuses += is_reused ? 1 : 0;
  stats.live_leases += 1;
  stats.live_bytes += state.block_bytes;
  stats.high_water_bytes = std::max(stats.high_water_bytes, stats.live_bytes);
  if (!state.key.empty()) {
    live_keys.insert(&state);
  }

  std::vector<EventRef> events;
  if (!block.fences.empty()) {
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
    stats.waits += events.size();
  }
  return events;
}

LeaseRef Pool::acquire(std::string key, size_t size_bytes, const StreamRef& stream) {
  impl_->expect_same_process();
  BW_EXPECTS(size_bytes <= kMaxLeaseBytes,
             "acquire of key '" + key + "': " + std::to_string(size_bytes) + " bytes is out of range");
  const PoolOptions& options = impl_->options;
  auto state = std::make_shared<Lease::State>();
  state->pool = impl_;
  state->key = std::move(key);
  state->size_bytes = size_bytes;
  // A lease of 0 bytes takes one unit too: its address is its own.
  state->block_bytes = round_up(std::max<size_t>(size_bytes, 1), options.align_bytes);
  if (options.poison) {
    state->block_bytes += options.align_bytes;
  }
  const bool is_on_host = impl_->device.id().kind == DeviceId::Kind::kCpu;
  const bool is_captured = !is_on_host && stream != nullptr && is_capturing(*stream);
  if (is_captured && options.poison) {
    refuse_captured(state->key, size_bytes, "every replay would write the poison again");
  }
  const LeaseRef lease(new Lease(state));  // once it has a block, an exception gives that back with its fences
  const std::vector<EventRef> events = impl_->take(*state, is_captured);
  for (const EventRef& event : events) {
    if (stream != nullptr) {
      stream->wait(event);
    } else {
      event->synchronize();
    }
  }
  if (stream == nullptr) {
    state->inherited.clear();
  }
  if (!is_on_host) {
    state->home = stream;
  }
  if (options.poison) {
    Stream* const behind = is_on_host && events.empty() ? nullptr : stream.get();
    state->fill_poison(true, behind);
    if (behind != nullptr) {
      state->inherited.assign(1, {state->offset_bytes, state->offset_bytes + state->block_bytes, behind->record()});
    }
    state->is_red_zone_set.store(true, std::memory_order_release);
  }
  return lease;
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

PoolStats Pool::stats() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

void Pool::check() const {
  std::lock_guard lock(impl_->mutex);
  std::string fault = impl_->blocks.find_fault(impl_->options.align_bytes);
  uint64_t live_bytes = 0;
  uint64_t live_leases = 0;
  uint64_t reserved_bytes = 0;
  for (const auto& [id, span] : impl_->blocks.spans()) {
    reserved_bytes += span.slab->size_bytes;
    for (const FreeList::Block* block = span.first; block != nullptr && fault.empty(); block = block->next) {
      if (block->is_free) {
        continue;
      }
      const auto* lease = static_cast<const Lease::State*>(block->owner);
      live_bytes += block->size_bytes;
      live_leases += 1;
      if (lease->block != block || lease->data != span.slab->data + block->offset_bytes ||
          lease->block_bytes != block->size_bytes) {
        fault = lease->describe() + " does not match its block";
      } else {
        fault = lease->find_red_zone_fault();
      }
    }
  }
  const PoolStats& stats = impl_->stats;
  if (fault.empty() &&
      (live_bytes != stats.live_bytes || live_leases != stats.live_leases || reserved_bytes != stats.reserved_bytes ||
       impl_->blocks.spans().size() != stats.slabs || impl_->slabs.size() != stats.slabs)) {
    fault = "the counters say " + std::to_string(stats.live_leases) + " leases, " + std::to_string(stats.live_bytes) +
            " bytes live, " + std::to_string(stats.reserved_bytes) + " reserved in " + std::to_string(stats.slabs) +
            " slabs; the slabs hold " + std::to_string(live_leases) + ", " + std::to_string(live_bytes) + ", " +
            std::to_string(reserved_bytes) + ", " + std::to_string(impl_->blocks.spans().size());
  }
  if (!fault.empty()) {
    throw PoolError("pool check: " + fault);
  }
}

std::string Pool::Impl::list_live_keys() const {
  constexpr size_t kListed = 16;
  std::string list;
  size_t count = 0;
  for (const auto& [id, span] : blocks.spans()) {
    for (const FreeList::Block* block = span.first; block != nullptr; block = block->next) {
      if (block->is_free || ++count > kListed) {
        continue;
      }
      const auto* lease = static_cast<const Lease::State*>(block->owner);
      list += (list.empty() ? "'" : ", '") + lease->key + "' (" + std::to_string(lease->size_bytes) + " bytes)";
    }
  }
  return count > kListed ? list + " and " + std::to_string(count - kListed) + " more" : list;
}

void Pool::expect_no_leases() const {
  std::lock_guard lock(impl_->mutex);
  if (impl_->stats.live_leases != 0) {
    throw LeaseLeak(std::to_string(impl_->stats.live_leases) + " leases are live: " + impl_->list_live_keys());
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
      impl_->slabs.erase(slab->data);
      impl_->stats.slabs -= 1;
      impl_->stats.reserved_bytes -= slab->size_bytes;
      freed_bytes += slab->size_bytes;
    }
  }
  // A host wait: unmapped memory must not be in use. Nobody else can get at these slabs any more.
  for (auto it = removed.begin(); it != removed.end(); ++it) {
    try {
      wait_for(it->second, {});
    } catch (const Error& error) {
      for (; it != removed.end(); ++it) {
        leak(it->first, error.what());
      }
      throw;
    }
  }
  return freed_bytes;
}

}  // namespace bucketwheel
