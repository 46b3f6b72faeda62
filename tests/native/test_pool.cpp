// pool/: errors, ownership, trim, red zones, fork. Run by test_native.py.
// needs: base device pool
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "gate.h"
#include "pool/pool.h"
#include "pools.h"

using namespace bucketwheel;

namespace {

// Slabs that cannot be had.
struct EmptyUpstream final : Upstream {
  SlabRef allocate(size_t size_bytes) override { throw PoolError("no " + std::to_string(size_bytes) + " bytes"); }
  const char* name() const override { return "empty"; }
};

}  // namespace

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
  if (emulator() != "qemu") {  // which gives it, and keeps a table of all its pages
    CHECK_THROWS(PoolError, "mmap failed", make_pool()->acquire("more than an address space", size_t{1} << 46));
  }
  unnamed->release();
  pool->check();
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

TEST(fork_child_refuses_the_parents_pool) {
  if (!may_fork()) {
    return;
  }
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
    end_child();
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  lease->release();
  pool->check();
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
