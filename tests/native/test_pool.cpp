// pool/: failing upstreams, trim, failed drops. Run by test_native.py; test_pool.py has errors, ownership and fork.
// needs: base device pool
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "pool/pool.h"
#include "pools.h"

using namespace bucketwheel;

namespace {

// Slabs that cannot be had.
struct EmptyUpstream final : Upstream {
  SlabRef allocate(size_t size_bytes) override { throw PoolError("no " + std::to_string(size_bytes) + " bytes"); }
};

// It has failed: nobody can tell when what is in it ends.
struct FailedStream final : Stream {
  void run(std::function<void()>) override {}
  EventRef record(bool) override { throw DeviceError("the stream has failed"); }
  void wait(const EventRef&) override {}
  bool synchronize(Deadline) override { return true; }
  void close() noexcept override {}
};

}  // namespace

TEST(an_upstream_that_fails_leaves_no_lease) {
  auto empty = Pool::make(cpu_device(), std::make_shared<EmptyUpstream>(), {512, kSlab, false});
  CHECK_THROWS(PoolError, "no 1048576 bytes", empty->acquire("x", 1));
  CHECK_THROWS(PoolError, "no 1048576 bytes", empty->acquire("x", 1));  // and not KeyBusy
  CHECK_THROWS(ValueError, "out of range", empty->acquire("huge", size_t(-1)));
  CHECK_THROWS(ValueError, "upstream", Pool::make(cpu_device(), nullptr));
  empty->check();
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

// Under AddressSanitizer: what refers to the lease must find another one.
TEST(a_lease_that_cannot_be_dropped_stays_live) {
  static auto* const pools = new std::vector<PoolRef>;  // to the end of the process, as such a lease
  for (const bool is_planned : {false, true}) {
    for (const char* key : {"planned", "other", ""}) {
      auto pool = pools->emplace_back(make_pool({512, kSlab, true}));
      if (is_planned) {
        pool->adopt({{"step", {{"planned", 0, 1024, false}}, {}, 1024, 1024}}, false);
      }
      auto lease = pool->acquire(key, 700);
      lease->use(std::make_shared<FailedStream>());
      std::byte* const bytes = lease->data();
      lease = nullptr;
      pool->check();
      CHECK_THROWS(LeaseLeak, "1 leases are live: '", pool->expect_no_leases());
      if (*key != 0) {
        CHECK_THROWS(KeyBusy, "another lease of the key is live", pool->acquire(key, 1));
      }
      auto beside = pool->acquire("beside", 700);
      CHECK(beside->data() != bytes);
      beside->release();
      bytes[700] = std::byte{1};
      CHECK_THROWS(PoolError, "bytes past its end were written", pool->check());
    }
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
