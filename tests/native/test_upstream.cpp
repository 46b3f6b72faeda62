// pool/upstream: shared-memory slabs and their descriptors. Run by test_native.py.
// needs: base device pool
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "pool/pool.h"
#include "pools.h"

using namespace bucketwheel;

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

int main(int argc, char** argv) { return run_tests(argc, argv); }
