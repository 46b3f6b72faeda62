#include "pool/pool.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/env.h"
#include "base/error.h"
#include "base/fork.h"
#include "device/device_cuda.h"
#include "pool/free_list.h"

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
  std::atomic<bool> is_left{false};  // nobody will release it

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
// A release gives the bytes back at once, with a *fence*: the event of their last use. The next owner of any of these
// bytes waits for it: its stream if it names one (the host goes on), else the host. The choice of a block looks at
// sizes and offsets only; a fence that is already done is dropped, which saves a wait and changes nothing else. So
// offsets depend on the order of calls alone, and ranks that make the same calls get the same offsets.
//
// A stream may still be waiting for inherited fences when its lease ends. If the lease ends with an event, that event
// comes behind these waits and replaces them. If it ends without one (never used, or dropped), the inherited fences
// are kept: otherwise the next owner could write while the owner before the last still reads.

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
  // An open fence is rare here, because handles keep the leases of running operations: somebody released with an event
  // and kept neither lease nor handle.
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
  stats.dropped_leases += is_dropped && !is_left ? 1 : 0;
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

void Lease::leave_to_owners() { state_->is_left = true; }

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
