// pool/: reuse under fences, on streams and among threads. Run by test_native.py.
// needs: base device pool
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "gate.h"
#include "pool/pool.h"
#include "pools.h"

using namespace bucketwheel;

TEST(without_a_stream_the_host_waits_outside_the_lock) {
  if (is_inline()) {
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

// A fence belongs to its bytes: an acquire of the free range beside them waits for nothing.
TEST(fences_stay_with_their_bytes_through_joins_and_splits) {
  if (is_inline()) {
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
  auto half = pool->acquire("half", 512, user);
  CHECK(pool->stats().waits == 1);
  auto other_half = pool->acquire("other half", 512, user);
  CHECK(pool->stats().waits == 2);
  auto beyond = pool->acquire("beyond", 1024);
  CHECK(pool->stats().waits == 2);
  pool->check();
  gate.open();
}

// Released unused, with its stream still waiting: the next owner must wait for the owner before.
TEST(fences_survive_a_lease_that_was_never_used) {
  if (is_inline()) {
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
  pool->acquire("second", 1024, second)->release();
  auto last = pool->acquire("third", 1024, third);
  CHECK(last->data() == bytes && pool->stats().waits == 2);
  third->run([bytes] { bytes[0] = std::byte{3}; });
  gate.open();
  third->synchronize();
  CHECK(seen == std::byte{1});
}

TEST(failed_acquire_gives_the_block_back) {
  if (is_inline()) {
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
  CHECK_THROWS(DeviceError, "'closed' is closed", pool->acquire("first", 1024, closed));
  pool->expect_no_leases();
  pool->check();
  auto user = cpu_device().new_stream("user");
  auto again = pool->acquire("first", 1024, user);
  CHECK(pool->stats().waits == 2);  // the fence was still there
  gate.open();
}

TEST(memory_in_use_outlives_pool_and_lease) {
  if (is_inline()) {
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

// The last use of a lease, on the stream; it is released before that has run.
static void use_and_release(Pool& pool, const StreamRef& stream, const LeaseRef& lease, std::byte value,
                            std::mt19937& random) {
  std::byte* bytes = lease->data();
  const size_t size = lease->size_bytes();
  stream->run([bytes, size, value, keep = lease->slab()] { CHECK(holds_only(bytes, size, static_cast<int>(value))); });
  EventRef used = stream->record();
  if (random() % 2) {
    // Tasks before it read lease->data(), which needs the lease live.
    stream->synchronize();
  } else {
    while (!used->query()) {
      std::this_thread::yield();
    }
  }
  lease->release(used);
  if (random() % 4 == 0) {
    stream->run([] { std::this_thread::sleep_for(std::chrono::microseconds(50)); });
    LeaseRef fenced = pool.acquire("", 600, stream);
    fenced->release(stream->record());
  }
}

// Threads acquire, write, hand over to streams and release, all at once. Every lease is checked to be its owner's
// alone.
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
          LeaseRef lease = pool->acquire(key, size, on_stream ? stream : StreamRef());
          const auto value = std::byte(1 + t);
          if (on_stream) {
            // The lease is kept by what uses it; its bytes are this thread's until the event.
            stream->run([lease, value] { std::memset(lease->data(), static_cast<int>(value), lease->size_bytes()); });
            stream->run(
                [lease, value] { CHECK(holds_only(lease->data(), lease->size_bytes(), static_cast<int>(value))); });
          } else {
            std::memset(lease->data(), static_cast<int>(value), size);
          }
          live.push_back(std::move(lease));
        } else if (!live.empty()) {
          const size_t chosen = random() % live.size();
          LeaseRef lease = live[chosen];
          live[chosen] = live.back();
          live.pop_back();
          use_and_release(*pool, stream, lease, std::byte(1 + t), random);
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
  CHECK(is_inline() || stats.waits > 10);
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
    LeaseRef lease = pool->acquire("", kWords * 8 * (1 + i % 3), write);
    auto* words = reinterpret_cast<uint64_t*>(lease->data());
    write->run([words, i] { std::fill_n(words, kWords, static_cast<uint64_t>(i)); });
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
    CHECK(*sums[i] == kWords * static_cast<uint64_t>(i));
  }
  const PoolStats stats = pool->stats();
  CHECK(stats.reuses > kSteps / 2 && (is_inline() || stats.waits > 50));
  pool->check();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
