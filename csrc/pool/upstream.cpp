#include "pool/upstream.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/align.h"
#include "base/error.h"
#include "base/mapping.h"

namespace bucketwheel {
namespace {

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

class MappedUpstream final : public Upstream {
 public:
  MappedUpstream(bool is_shared, std::function<void(const SlabRef&)> on_slab)
      : is_shared_(is_shared), on_slab_(std::move(on_slab)) {}

  SlabRef allocate(size_t size_bytes) override {
    auto slab = std::make_shared<MappedSlab>();
    const size_t mapped = round_up(size_bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
    if (is_shared_) {
      // The size is final: a peer that maps the slab cannot be made to fault by cutting it.
      const char* failed = nullptr;
      slab->fd = try_make_memfd("bucketwheel", mapped, failed).release();
      if (failed != nullptr) {
        refuse(failed, size_bytes, errno, descriptor_remedy(errno));
      }
    }
    const int flags = is_shared_ ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    slab->data = map_at_huge_page(mapped, PROT_READ | PROT_WRITE, flags, slab->fd);
    if (slab->data == nullptr) {
      refuse("mmap", mapped, errno, memory_remedy(errno));
    }
    madvise(slab->data, mapped, MADV_HUGEPAGE);  // a wish; kernels without it refuse, which does no harm
    slab->size_bytes = mapped;
    slab->id = new_id();
    if (on_slab_) {
      on_slab_(slab);
    }
    return slab;
  }

 private:
  const bool is_shared_;
  const std::function<void(const SlabRef&)> on_slab_;
};

}  // namespace

UpstreamRef make_host_upstream() { return std::make_shared<MappedUpstream>(false, nullptr); }

UpstreamRef make_shm_upstream(std::function<void(const SlabRef&)> on_slab) {
  return std::make_shared<MappedUpstream>(true, std::move(on_slab));
}

}  // namespace bucketwheel
