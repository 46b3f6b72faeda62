// pool/upstream: shared-memory slabs and their descriptors; sleeping slabs. Run by test_native.py.
// needs: base device pool
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

namespace {

size_t resident_pages(const Slab& slab) {
  std::vector<unsigned char> pages(slab.size_bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  CHECK(mincore(slab.data, slab.size_bytes, pages.data()) == 0);
  return static_cast<size_t>(std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; }));
}

size_t file_bytes(const Slab& slab) {
  struct stat about{};
  CHECK(fstat(slab.fd, &about) == 0 && static_cast<size_t>(about.st_size) == slab.size_bytes);
  return 512 * static_cast<size_t>(about.st_blocks);
}

void fill(Slab& slab, int value) { std::memset(slab.data, value, slab.size_bytes); }

}  // namespace

TEST(a_sleeping_host_slab_has_no_memory) {
  const SlabRef slab = make_host_upstream()->allocate(3 * kSlab + 1);
  std::byte* const data = slab->data;
  for (int turn = 1; turn < 4; ++turn) {
    fill(*slab, turn);
    CHECK(resident_pages(*slab) == slab->size_bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
    CHECK(slab->sleep());
    CHECK(resident_pages(*slab) == 0);
    slab->wake();
    CHECK(slab->data == data);
    CHECK(holds_only(slab->data, slab->size_bytes, 0));
  }
}

TEST(a_sleeping_shm_slab_has_no_memory_in_any_process) {
  const SlabRef slab = make_shm_upstream()->allocate(3 * kSlab + 1);
  auto* const peer =
      static_cast<std::byte*>(mmap(nullptr, slab->size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, slab->fd, 0));
  CHECK(peer != MAP_FAILED);
  for (int turn = 1; turn < 4; ++turn) {
    fill(*slab, turn);
    CHECK(holds_only(peer, slab->size_bytes, turn));
    CHECK(file_bytes(*slab) >= slab->size_bytes);
    CHECK(slab->sleep());
    CHECK(file_bytes(*slab) == 0);
    slab->wake();
    CHECK(holds_only(peer, slab->size_bytes, 0));
    peer[slab->size_bytes - 1] = std::byte{42};
    CHECK(slab->data[slab->size_bytes - 1] == std::byte{42});
  }
  munmap(peer, slab->size_bytes);
}

TEST(a_slab_that_cannot_sleep_says_so) {
  const SlabRef slab = CountedUpstream().allocate(kSlab);
  fill(*slab, 7);
  CHECK(!slab->sleep());
  CHECK(holds_only(slab->data, slab->size_bytes, 7));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
