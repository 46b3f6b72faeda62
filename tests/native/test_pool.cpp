// pool/: placement against a reference model, fences, ownership, threads, fork. Run by test_native.py.
// needs: base device pool
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/env.h"
#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "pool/pool.h"

using namespace bucketwheel;

namespace {

constexpr size_t kSlab = size_t{1} << 20;

PoolRef make_pool(PoolOptions options = {512, kSlab, false}) {
  return Pool::make(cpu_device(), make_host_upstream(), options);
}

struct Gate {
  std::atomic<bool> is_open{false};
  void open() { is_open = true; }
  void wait() const {
    while (!is_open) {
      std::this_thread::yield();
    }
  }
};

// All bytes are `value`: the first one is, and each equals its neighbour (memcmp, which is quick under sanitizers too).
bool holds_only(const std::byte* bytes, size_t size, int value) {
  return size == 0 || (bytes[0] == std::byte(value) && std::memcmp(bytes, bytes + 1, size - 1) == 0);
}

// Slabs that cannot be had.
struct EmptyUpstream final : Upstream {
  SlabRef allocate(size_t size_bytes) override { throw PoolError("no " + std::to_string(size_bytes) + " bytes"); }
  const char* name() const override { return "empty"; }
};

// Counts what is mapped.
struct CountedUpstream final : Upstream {
  struct Counted final : Slab {
    std::shared_ptr<std::atomic<int>> count;
    SlabRef inner;
    ~Counted() override { --*count; }
  };
  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<Counted>();
    slab->inner = host->allocate(size_bytes);
    slab->data = slab->inner->data;
    slab->size_bytes = slab->inner->size_bytes;
    slab->id = slab->inner->id;
    slab->count = mapped;
    ++*mapped;
    ++allocated;
    return slab;
  }
  const char* name() const override { return "counted"; }
  UpstreamRef host = make_host_upstream();
  std::shared_ptr<std::atomic<int>> mapped = std::make_shared<std::atomic<int>>(0);
  int allocated = 0;
};

// The pool's rule in its plainest form: every byte range in one list, scanned from the front.
class Model {
 public:
  std::pair<uint32_t, size_t> acquire(size_t size_bytes) {
    const size_t red_zone_bytes = env().pool_poison ? 512 : 0;
    size_bytes = round_up(std::max<size_t>(size_bytes, 1), 512) + red_zone_bytes;
    for (;;) {
      std::optional<std::pair<uint32_t, size_t>> best;
      for (const auto& [place, range] : ranges_) {
        if (range.is_free && range.size >= size_bytes && (!best || range.size < ranges_.at(*best).size)) {
          best = place;
        }
      }
      if (best) {
        Range& range = ranges_.at(*best);
        if (range.size > size_bytes) {
          ranges_[{best->first, best->second + size_bytes}] = {range.size - size_bytes, true};
        }
        range = {size_bytes, false};
        return *best;
      }
      ranges_[{slabs_++, 0}] = {round_up(std::max(size_bytes, kSlab), 4096), true};
    }
  }

  void release(std::pair<uint32_t, size_t> place) {
    ranges_.at(place).is_free = true;
    for (auto it = ranges_.begin(); it != ranges_.end();) {
      auto next = std::next(it);
      if (next != ranges_.end() && it->second.is_free && next->second.is_free &&
          it->first.first == next->first.first && it->first.second + it->second.size == next->first.second) {
        it->second.size += next->second.size;
        ranges_.erase(next);
      } else {
        it = next;
      }
    }
  }

  uint32_t slabs() const { return slabs_; }

 private:
  struct Range {
    size_t size;
    bool is_free;
  };
  std::map<std::pair<uint32_t, size_t>, Range> ranges_;
  uint32_t slabs_ = 0;
};

}  // namespace

// Whatever the fences do, offsets are the model's; live leases never overlap (their bytes keep their values).
TEST(placement_follows_the_reference_model) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    auto pool = make_pool();
    auto stream = cpu_device().new_stream("model");
    Model model;
    std::vector<std::pair<LeaseRef, unsigned char>> live;
    for (int i = 0; i < 2000; ++i) {
      if (live.empty() || (live.size() < 60 && random() % 100 < 52)) {
        const size_t sizes[] = {0, 1, 511, 512, 513, 4096, 70000, kSlab / 3, kSlab + 1};
        const size_t size = random() % 3 ? random() % 40000 : sizes[random() % 9];
        LeaseRef lease = pool->acquire("", size, random() % 2 ? stream.get() : nullptr);
        stream->synchronize();
        const auto place = model.acquire(size);
        CHECK(place == std::pair(lease->slab()->id, lease->offset_bytes()));
        CHECK(lease->data() == lease->slab()->data + lease->offset_bytes());
        CHECK(is_aligned(lease->data(), 512) && lease->size_bytes() == size);
        std::memset(lease->data(), i & 255, size);
        live.emplace_back(lease, i & 255);
      } else {
        const size_t chosen = random() % live.size();
        auto [lease, value] = live[chosen];
        live[chosen] = live.back();
        live.pop_back();
        CHECK(holds_only(lease->data(), lease->size_bytes(), value));
        if (random() % 2) {
          stream->run([] {});
        }
        lease->release(random() % 2 ? stream->record() : nullptr);
        model.release({lease->slab()->id, lease->offset_bytes()});
      }
      if (i % 100 == 0) {
        pool->check();
      }
    }
    const PoolStats stats = pool->stats();
    CHECK(stats.live_leases == live.size() && stats.slabs == model.slabs());
    CHECK(stats.reuses > 300 && stats.high_water_bytes >= stats.live_bytes);
    live.clear();
    pool->check();
    CHECK(pool->stats().live_bytes == 0 && pool->stats().live_leases == 0 && pool->stats().dropped_leases > 0);
    pool->expect_no_leases();
  }
}

TEST(next_owners_stream_waits_for_the_fence_and_the_host_does_not) {
  if (env().stream_inline) {
    return;
  }
  Gate gate;
  auto pool = make_pool();
  auto reader = cpu_device().new_stream("reader");
  auto writer = cpu_device().new_stream("writer");
  auto first = pool->acquire("w0", 1024);
  std::byte* bytes = first->data();
  bytes[0] = std::byte{1};
  std::byte seen{0};
  reader->run([&] {
    gate.wait();
    seen = bytes[0];
  });
  first->release(reader->record());
  auto second = pool->acquire("w1", 1024, writer.get());  // does not block: the gate is closed
  CHECK(second->data() == bytes);
  writer->run([bytes] { bytes[0] = std::byte{2}; });
  EventRef written = writer->record();
  CHECK(!written->query());
  CHECK(pool->stats().waits == 1 && pool->stats().reuses == 1);
  gate.open();
  CHECK(written->synchronize());
  CHECK(seen == std::byte{1} && bytes[0] == std::byte{2});
}

TEST(without_a_stream_the_host_waits_outside_the_lock) {
  if (env().stream_inline) {
    return;
  }
  Gate gate;
  auto pool = make_pool();
  auto stream = cpu_device().new_stream("busy");
  auto first = pool->acquire("first", 1024);
  std::byte* bytes = first->data();
  std::atomic<bool> is_used{true};
  stream->run([&] {
    gate.wait();
    is_used = false;
  });
  first->release(stream->record());
  std::thread other([&] {
    while (pool->stats().waits == 0) {
      std::this_thread::yield();
    }
    // The main thread waits for the fence now; the pool serves others.
    pool->acquire("other", 100)->release();
    pool->check();
    CHECK(is_used);
    gate.open();
  });
  auto second = pool->acquire("second", 1024);
  CHECK(!is_used && second->data() == bytes);
  other.join();
}

TEST(done_fences_are_not_waits) {
  auto pool = make_pool();
  auto stream = cpu_device().new_stream("done");
  for (int i = 0; i < 10; ++i) {
    auto lease = pool->acquire("x", 4096, stream.get());
    stream->run([] {});
    EventRef event = stream->record();
    lease->release(event);
    CHECK(event->synchronize());
  }
  CHECK(pool->stats().waits == 0 && pool->stats().reuses == 9);
}

// A fence belongs to its bytes: an acquire of the free range beside them waits for nothing.
TEST(fences_stay_with_their_bytes_through_joins_and_splits) {
  if (env().stream_inline) {
    return;
  }
  Gate gate;
  auto pool = make_pool();
  auto busy = cpu_device().new_stream("busy");
  auto user = cpu_device().new_stream("user");
  auto a = pool->acquire("a", 1024);
  auto b = pool->acquire("b", 1024);
  auto c = pool->acquire("c", 1024);
  const size_t a_offset = a->offset_bytes();
  busy->run([&] { gate.wait(); });
  a->release();
  b->release(busy->record());
  c->release();  // one free range from here to the end of the slab, a fence in its middle
  pool->check();
  auto part = pool->acquire("part", 1024);
  CHECK(part->offset_bytes() == a_offset && pool->stats().waits == 0);
  auto half = pool->acquire("half", 512, user.get());
  CHECK(pool->stats().waits == 1);
  auto other_half = pool->acquire("other half", 512, user.get());
  CHECK(pool->stats().waits == 2);
  auto beyond = pool->acquire("beyond", 1024);
  CHECK(pool->stats().waits == 2);
  pool->check();
  gate.open();
}

// Released unused, with its stream still waiting: the next owner must wait for the owner before.
TEST(fences_survive_a_lease_that_was_never_used) {
  if (env().stream_inline) {
    return;
  }
  Gate gate;
  auto pool = make_pool();
  auto busy = cpu_device().new_stream("busy");
  auto second = cpu_device().new_stream("second");
  auto third = cpu_device().new_stream("third");
  auto lease = pool->acquire("first", 1024);
  std::byte* bytes = lease->data();
  std::byte seen{0};
  bytes[0] = std::byte{1};
  busy->run([&] {
    gate.wait();
    seen = bytes[0];
  });
  lease->release(busy->record());
  pool->acquire("second", 1024, second.get())->release();
  auto last = pool->acquire("third", 1024, third.get());
  CHECK(last->data() == bytes && pool->stats().waits == 2);
  third->run([bytes] { bytes[0] = std::byte{3}; });
  gate.open();
  third->synchronize();
  CHECK(seen == std::byte{1});
}

TEST(failed_acquire_gives_the_block_back) {
  if (env().stream_inline) {
    return;
  }
  Gate gate;
  auto pool = make_pool();
  auto busy = cpu_device().new_stream("busy");
  auto closed = cpu_device().new_stream("closed");
  closed->close();
  auto lease = pool->acquire("first", 1024);
  busy->run([&] { gate.wait(); });
  lease->release(busy->record());
  CHECK_THROWS(DeviceError, "'closed' is closed", pool->acquire("first", 1024, closed.get()));
  pool->expect_no_leases();
  pool->check();
  auto user = cpu_device().new_stream("user");
  auto again = pool->acquire("first", 1024, user.get());
  CHECK(pool->stats().waits == 2);  // the fence was still there
  gate.open();
}

TEST(misuse_has_named_errors) {
  auto pool = make_pool();
  auto lease = pool->acquire("grads/0", 1000);
  CHECK_THROWS(KeyBusy, "'grads/0'", pool->acquire("grads/0", 2000));
  auto unnamed = pool->acquire("", 10);
  pool->acquire("", 10)->release();
  CHECK_THROWS(LeaseLeak, "2 leases are live: 'grads/0' (1000 bytes), '' (10 bytes)", pool->expect_no_leases());
  lease->release();
  CHECK_THROWS(ReleasedTwice, "lease 'grads/0' of 1000 bytes", lease->release());
  CHECK_THROWS(UseAfterRelease, "grads/0", lease->data());
  CHECK(!lease->is_live());
  pool->acquire("grads/0", 1000)->release();
  CHECK_THROWS(ValueError, "out of range", pool->acquire("huge", size_t(-1)));
  CHECK_THROWS(ValueError, "power of two", make_pool({48, kSlab, false}));
  CHECK_THROWS(ValueError, "upstream", Pool::make(cpu_device(), nullptr));
  auto empty = Pool::make(cpu_device(), std::make_shared<EmptyUpstream>(), {512, kSlab, false});
  CHECK_THROWS(PoolError, "no 1048576 bytes", empty->acquire("x", 1));
  CHECK_THROWS(PoolError, "no 1048576 bytes", empty->acquire("x", 1));  // and not KeyBusy
  empty->check();
  CHECK_THROWS(PoolError, "mmap failed", make_pool()->acquire("more than an address space", size_t{1} << 46));
  unnamed->release();
  pool->check();
}

TEST(zero_bytes_large_sizes_and_alignments) {
  for (size_t align : {size_t{1}, size_t{64}, size_t{512}, size_t{4096}}) {
    auto pool = make_pool({align, kSlab, false});
    auto zero = pool->acquire("zero", 0);
    auto one = pool->acquire("one", 1);
    auto also_zero = pool->acquire("also zero", 0);
    CHECK(zero->data() != nullptr && zero->data() != also_zero->data() && zero->size_bytes() == 0);
    auto large = pool->acquire("large", 5 * kSlab + 3);
    CHECK(large->slab() != one->slab() && large->slab()->size_bytes >= 5 * kSlab + 3);
    for (const LeaseRef& lease : {zero, one, also_zero, large}) {
      CHECK(is_aligned(lease->data(), align));
    }
    large->data()[5 * kSlab + 2] = std::byte{1};
    pool->check();
  }
}

TEST(locate_finds_exactly_the_pools_memory) {
  auto pool = make_pool();
  auto lease = pool->acquire("x", 3 * kSlab);
  auto other = pool->acquire("y", 100);
  auto found = pool->locate(lease->data() + 10, 20);
  CHECK(found.slab == lease->slab() && found.offset_bytes == lease->offset_bytes() + 10);
  CHECK(pool->locate(other->data(), 100).slab == other->slab());
  const SlabRef& slab = lease->slab();
  CHECK(pool->locate(slab->data, slab->size_bytes).slab == slab);
  CHECK(pool->locate(slab->data, slab->size_bytes + 1).slab == nullptr);
  CHECK(pool->locate(slab->data + slab->size_bytes, 0).slab != slab);
  int on_stack = 0;
  CHECK(pool->locate(&on_stack, 4).slab == nullptr);
  CHECK(pool->locate(nullptr, 0).slab == nullptr);
  CHECK(make_pool()->locate(lease->data(), 1).slab == nullptr);
}

TEST(trim_returns_what_is_unused) {
  auto upstream = std::make_shared<CountedUpstream>();
  auto pool = Pool::make(cpu_device(), upstream, {512, kSlab, false});
  auto stream = cpu_device().new_stream("user");
  auto kept = pool->acquire("kept", 100);
  auto gone = pool->acquire("gone", 2 * kSlab);
  std::byte* bytes = gone->data();
  bool is_used = false;
  stream->run([&is_used, bytes] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    bytes[0] = std::byte{1};  // a crash if the slab were unmapped already
    is_used = true;
  });
  gone->release(stream->record());
  CHECK(*upstream->mapped == 2);
  gone.reset();
  const size_t gone_bytes = pool->stats().reserved_bytes - kSlab;
  CHECK(gone_bytes >= 2 * kSlab && pool->trim() == gone_bytes);
  CHECK(is_used && *upstream->mapped == 1);
  CHECK(pool->locate(bytes, 1).slab == nullptr && pool->stats().slabs == 1);
  CHECK(pool->stats().reserved_bytes == kSlab);
  pool->check();
  CHECK(pool->trim() == 0);
  kept->release();
  kept.reset();
  CHECK(pool->trim() == kSlab && *upstream->mapped == 0);
  CHECK(pool->acquire("again", 10)->data() != nullptr);
  pool->check();
}

TEST(leases_outlive_the_pool) {
  auto upstream = std::make_shared<CountedUpstream>();
  auto mapped = upstream->mapped;
  auto pool = Pool::make(cpu_device(), upstream, {512, kSlab, false});
  auto lease = pool->acquire("outlives", 100);
  auto released = pool->acquire("released", 3 * kSlab);
  released->release();
  pool.reset();
  CHECK(*mapped == 2);
  std::memset(lease->data(), 1, 100);
  lease->release();
  lease.reset();
  CHECK(*mapped == 2);
  released.reset();
  CHECK(*mapped == 0);
}

TEST(memory_in_use_outlives_pool_and_lease) {
  if (env().stream_inline) {
    return;
  }
  auto upstream = std::make_shared<CountedUpstream>();
  auto stream = cpu_device().new_stream("late");
  auto pool = Pool::make(cpu_device(), upstream, {512, kSlab, false});
  auto lease = pool->acquire("late", 100);
  std::byte* bytes = lease->data();
  stream->run([bytes] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    std::memset(bytes, 1, 100);  // a crash if the slab were unmapped already
  });
  lease->release(stream->record());
  lease.reset();
  pool.reset();
  stream->synchronize();
  CHECK(*upstream->mapped == 0);
}

TEST(a_fixed_cycle_allocates_one_slab) {
  auto upstream = std::make_shared<CountedUpstream>();
  auto pool = Pool::make(cpu_device(), upstream, {512, kSlab, false});
  std::vector<std::pair<uint32_t, size_t>> first_places;
  for (int step = 0; step < 500; ++step) {
    std::vector<LeaseRef> leases;
    for (int i = 0; i < 10; ++i) {
      leases.push_back(pool->acquire(std::to_string(i), 10000 * (i + 1)));
      const std::pair place(leases[i]->slab()->id, leases[i]->offset_bytes());
      if (step == 0) {
        first_places.push_back(place);
      }
      CHECK(place == first_places[i]);  // a key keeps its address
    }
    for (auto& lease : leases) {
      lease->release();
    }
  }
  CHECK(upstream->allocated == 1);
  CHECK(pool->stats().reuses == 4990);
}

TEST(poison_fills_what_is_acquired_and_released) {
  auto pool = make_pool({512, kSlab, true});
  auto lease = pool->acquire("p", 1000);
  auto is_poisoned = [](const std::byte* bytes, size_t size) { return holds_only(bytes, size, 0xFF); };
  std::byte* bytes = lease->data();
  CHECK(is_poisoned(bytes, 1000));
  std::memset(bytes, 1, 1000);
  lease->release();
  CHECK(is_poisoned(bytes, 1000));
  if (env().stream_inline) {
    return;
  }
  // Behind fences the next owner's stream does it, after the last use.
  Gate gate;
  Gate late;
  auto reader = cpu_device().new_stream("reader");
  auto filler = cpu_device().new_stream("filler");
  auto user = cpu_device().new_stream("user");
  lease = pool->acquire("p", 1000);
  std::memset(bytes, 7, 1000);
  bool was_intact = false;
  reader->run([&] {
    gate.wait();
    was_intact = bytes[0] == std::byte{7} && bytes[999] == std::byte{7};
  });
  lease->release(reader->record());
  filler->run([&] { late.wait(); });
  lease = pool->acquire("p", 1000, filler.get());
  lease->release();                              // not used: the filler's fill is still to come
  lease = pool->acquire("p", 1000, user.get());  // and must not come after this
  bool is_clean = false;
  user->run([&] {
    is_clean = is_poisoned(bytes, 1000);
    std::memset(bytes, 9, 1000);
  });
  gate.open();
  CHECK(!user->synchronize(deadline_in(0.02)));
  late.open();
  CHECK(user->synchronize() && filler->synchronize());
  CHECK(was_intact && is_clean && bytes[999] == std::byte{9});
  pool->check();
}

TEST(writing_past_the_end_is_found) {
  auto pool = make_pool({512, kSlab, true});
  auto lease = pool->acquire("short", 1000);
  auto neighbour = pool->acquire("next", 512);
  lease->data()[1000] = std::byte{0};
  CHECK_THROWS(PoolError, "'short' of 1000 bytes", pool->check());
  CHECK_THROWS(PoolError, "the first at offset 1000", lease->release());
  CHECK(!lease->is_live());
  pool->check();
  neighbour->data()[512 + 511] = std::byte{0};  // the red zone holds even where the size is a multiple of the alignment
  CHECK_THROWS(PoolError, "'next'", neighbour->release());
}

TEST(shm_slabs_are_sealed_and_shared) {
  std::vector<SlabRef> seen;
  auto pool = Pool::make(cpu_device(), make_shm_upstream([&](const SlabRef& slab) { seen.push_back(slab); }),
                         {512, kSlab, false});
  auto lease = pool->acquire("shared", 3 * kSlab);
  CHECK(seen.size() == 1 && seen[0] == lease->slab());
  const SlabRef& slab = lease->slab();
  CHECK(slab->fd >= 0);
  CHECK(ftruncate(slab->fd, 0) == -1 && errno == EPERM);
  CHECK((fcntl(slab->fd, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(env().pool_poison || holds_only(slab->data, slab->size_bytes, 0));
  void* again = mmap(nullptr, slab->size_bytes, PROT_READ, MAP_SHARED, slab->fd, 0);
  CHECK(again != MAP_FAILED);
  lease->data()[5] = std::byte{42};
  CHECK(static_cast<std::byte*>(again)[lease->offset_bytes() + 5] == std::byte{42});
  munmap(again, slab->size_bytes);
}

TEST(descriptors_are_given_back) {
  auto lowest_free = [] {
    const int fd = dup(0);
    close(fd);
    return fd;
  };
  const int before = lowest_free();
  for (int i = 0; i < 50; ++i) {
    auto pool = Pool::make(cpu_device(), make_shm_upstream(), {512, kSlab, false});
    pool->acquire("x", 100)->release();
  }
  CHECK(lowest_free() == before);
  auto pool = Pool::make(cpu_device(), make_shm_upstream([](const SlabRef&) { throw PoolError("a peer refused"); }));
  CHECK_THROWS(PoolError, "a peer refused", pool->acquire("x", 1));
  CHECK(lowest_free() == before);
  pool->check();
}

// Threads acquire, write, hand over to streams and release, all at once. Every lease is checked to be its owner's alone.
TEST(threads_hammer_one_pool) {
  auto pool = make_pool({512, kSlab, false});
  constexpr int kThreads = 3;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937 random(t);
      auto stream = cpu_device().new_stream("hammer");
      std::vector<LeaseRef> live;
      for (int i = 0; i < 1500; ++i) {
        if (live.size() < 8 && random() % 2 == 0) {
          const size_t size = 8 + random() % 3000;
          const bool on_stream = random() % 2 == 0;
          const std::string key = random() % 2 ? "" : std::to_string(t) + "/" + std::to_string(i);
          LeaseRef lease = pool->acquire(key, size, on_stream ? stream.get() : nullptr);
          const auto value = std::byte(1 + t);
          if (on_stream) {
            // The lease is kept by what uses it; its bytes are this thread's until the event.
            stream->run([lease, value] { std::memset(lease->data(), int(value), lease->size_bytes()); });
            stream->run([lease, value] {
              CHECK(holds_only(lease->data(), lease->size_bytes(), int(value)));
            });
          } else {
            std::memset(lease->data(), int(value), size);
          }
          live.push_back(std::move(lease));
        } else if (!live.empty()) {
          const size_t chosen = random() % live.size();
          LeaseRef lease = live[chosen];
          live[chosen] = live.back();
          live.pop_back();
          std::byte* bytes = lease->data();
          const size_t size = lease->size_bytes();
          const auto value = std::byte(1 + t);
          // The last use, on the stream; released before it has run.
          stream->run([bytes, size, value, keep = lease->slab()] {
            CHECK(holds_only(bytes, size, int(value)));
          });
          EventRef used = stream->record();
          if (random() % 2) {
            // Tasks above read lease->data(), which needs the lease live.
            stream->synchronize();
          } else {
            while (!used->query()) {
              std::this_thread::yield();
            }
          }
          lease->release(used);
          if (random() % 4 == 0) {
            stream->run([] { std::this_thread::sleep_for(std::chrono::microseconds(50)); });
            LeaseRef fenced = pool->acquire("", 600, stream.get());
            fenced->release(stream->record());
          }
        }
        if (i % 200 == t) {
          pool->check();
          pool->trim();
        }
      }
      stream->synchronize();
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  pool->check();
  pool->expect_no_leases();
  const PoolStats stats = pool->stats();
  CHECK(stats.acquires > 1000 && stats.reuses > 500);
  CHECK(env().stream_inline || stats.waits > 10);
}

// Producers and consumers on their own streams, memory reused under fences only, the host never waiting.
TEST(fenced_reuse_keeps_every_value) {
  auto pool = make_pool({512, kSlab, false});
  auto write = cpu_device().new_stream("write");
  auto read = cpu_device().new_stream("read");
  std::vector<std::unique_ptr<uint64_t>> sums;
  constexpr int kSteps = 400;
  constexpr size_t kWords = 1024;
  for (int i = 0; i < kSteps; ++i) {
    LeaseRef lease = pool->acquire("", kWords * 8 * (1 + i % 3), write.get());
    auto* words = reinterpret_cast<uint64_t*>(lease->data());
    write->run([words, i] { std::fill_n(words, kWords, uint64_t(i)); });
    read->wait(write->record());
    sums.push_back(std::make_unique<uint64_t>(0));
    read->run([words, sum = sums.back().get(), i] {
      if (i % 40 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      for (size_t w = 0; w < kWords; ++w) {
        *sum += words[w];
      }
    });
    lease->release(read->record());
  }
  read->synchronize();
  for (int i = 0; i < kSteps; ++i) {
    CHECK(*sums[i] == kWords * uint64_t(i));
  }
  const PoolStats stats = pool->stats();
  CHECK(stats.reuses > kSteps / 2 && (env().stream_inline || stats.waits > 50));
  pool->check();
}

TEST(hundred_thousand_leases) {
  auto pool = make_pool();
  std::vector<LeaseRef> leases;
  for (int i = 0; i < 100000; ++i) {
    leases.push_back(pool->acquire(std::to_string(i), i % 700));
  }
  for (int i = 0; i < 100000; i += 2) {
    leases[i]->release();
  }
  for (int i = 1; i < 100000; i += 2) {
    leases[i]->release();
  }
  pool->check();
  CHECK(pool->stats().high_water_bytes >= 100000 * 512 && pool->stats().live_bytes == 0);
  const size_t reserved_bytes = pool->stats().reserved_bytes;
  leases.clear();
  CHECK(pool->trim() == reserved_bytes && pool->stats().slabs == 0);
}

TEST(fork_child_refuses_the_parents_pool) {
  auto pool = make_pool();
  auto lease = pool->acquire("parents", 100);
  lease->data()[0] = std::byte{1};
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20);
    CHECK_THROWS(PoolError, "after fork()", pool->acquire("x", 1));
    CHECK_THROWS(PoolError, "after fork()", lease->release());
    CHECK_THROWS(PoolError, "after fork()", pool->trim());
    CHECK(lease->data()[0] == std::byte{1});
    lease.reset();
    pool.reset();
    auto own = make_pool();
    own->acquire("x", 100)->release();
    own->check();
    std::_Exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  lease->release();
  pool->check();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
