#include "pool/upstream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "base/memfd.h"

namespace bucketwheel {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

[[noreturn]] void refuse(const char* what, size_t size_bytes, int error, const char* remedy) {
  throw PoolError(std::string("a slab of ") + std::to_string(size_bytes) + " bytes: " + what +
                  " failed: " + std::generic_category().message(error) + " (" + remedy + ")");
}

const char* memory_remedy(int error) {
  return error == ENOMEM ? "the process or its container is out of memory or address space: see 'ulimit -v', "
                           "vm.overcommit_memory and vm.max_map_count, or use smaller buckets"
                         : "see mmap(2)";
}

const char* descriptor_remedy(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
      return "no file descriptor is left: raise 'ulimit -n'";
    case ENOSYS:
    case EPERM:
      return "the kernel or a seccomp profile refuses memfd_create: allow it, or use the 'host' upstream";
    default:
      return "see memfd_create(2), ftruncate(2) and fcntl(2)";
  }
}

struct MappedSlab final : Slab {
  ~MappedSlab() override {
    if (data != nullptr) {
      munmap(data, size_bytes);
    }
    if (fd >= 0) {
      ::close(fd);
    }
  }
};

// Maps with the base at a huge page, so that the kernel may use huge pages from the first byte on.
std::byte* map(size_t size_bytes, int flags, int fd) {
  const size_t slack = size_bytes >= kHugePageBytes ? kHugePageBytes : 0;
  void* base = mmap(nullptr, size_bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    refuse("mmap", size_bytes, errno, memory_remedy(errno));
  }
  const auto start = reinterpret_cast<uintptr_t>(base);
  const uintptr_t aligned = slack == 0 ? start : round_up(start, kHugePageBytes);
  if (aligned != start) {
    munmap(base, aligned - start);
  }
  if (aligned + size_bytes != start + size_bytes + slack) {
    munmap(reinterpret_cast<void*>(aligned + size_bytes), start + slack - aligned);
  }
  void* data = mmap(reinterpret_cast<void*>(aligned), size_bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    munmap(reinterpret_cast<void*>(aligned), size_bytes);
    refuse("mmap", size_bytes, error, memory_remedy(error));
  }
  madvise(data, size_bytes, MADV_HUGEPAGE);  // a wish; kernels without it refuse, which does no harm
  return static_cast<std::byte*>(data);
}

class HostUpstream final : public Upstream {
 public:
  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<MappedSlab>();
    const size_t mapped = round_up(size_bytes, page_bytes());
    slab->data = map(mapped, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    slab->size_bytes = mapped;
    slab->id = new_id();
    return slab;
  }
};

class ShmUpstream final : public Upstream {
 public:
  explicit ShmUpstream(std::function<void(const SlabRef&)> on_slab) : on_slab_(std::move(on_slab)) {}

  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<MappedSlab>();
    const size_t mapped = round_up(size_bytes, page_bytes());
    // The size is final: a peer that maps the slab cannot be made to fault by cutting it.
    const char* failed = nullptr;
    slab->fd = try_make_memfd("bucketwheel", mapped, failed).release();
    if (failed != nullptr) {
      refuse(failed, size_bytes, errno, descriptor_remedy(errno));
    }
    slab->data = map(mapped, MAP_SHARED, slab->fd);
    slab->size_bytes = mapped;
    slab->id = new_id();
    if (on_slab_) {
      on_slab_(slab);
    }
    return slab;
  }

 private:
  const std::function<void(const SlabRef&)> on_slab_;
};

}  // namespace

UpstreamRef make_host_upstream() { return std::make_shared<HostUpstream>(); }

UpstreamRef make_shm_upstream(std::function<void(const SlabRef&)> on_slab) {
  return std::make_shared<ShmUpstream>(std::move(on_slab));
}

}  // namespace bucketwheel
