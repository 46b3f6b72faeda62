#include "one_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <mutex>
#include <vector>

#include "check.h"

// The names that the linker's --wrap gives to the calls and to the real functions.
extern "C" {
void* __real_mmap(void* place, size_t size_bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* data, size_t size_bytes);
void* __wrap_mmap(void* place, size_t size_bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* data, size_t size_bytes);
}

namespace {

struct Shared {
  dev_t device;
  ino_t inode;
  void* data;
  size_t size_bytes;
  int users;
};

struct Registry {
  std::mutex mutex;
  std::vector<Shared> mappings;
  int mapped_again = 0;
};

Registry& registry() {
  static Registry* const made = new Registry();  // never freed: memory is unmapped at any time
  return *made;
}

}  // namespace

void* __wrap_mmap(void* place, size_t size_bytes, int protection, int flags, int fd, off_t offset) {
  if (fd < 0 || (flags & MAP_SHARED) == 0) {
    return __real_mmap(place, size_bytes, protection, flags, fd, offset);
  }
  struct stat file{};
  CHECK(fstat(fd, &file) == 0 && offset == 0);
  const std::lock_guard lock(registry().mutex);
  for (Shared& shared : registry().mappings) {
    if (shared.device == file.st_dev && shared.inode == file.st_ino) {
      CHECK(shared.size_bytes == size_bytes);
      if ((flags & MAP_FIXED) != 0) {
        CHECK(__real_munmap(place, size_bytes) == 0);  // what was set aside for it
      }
      ++shared.users;
      ++registry().mapped_again;
      return shared.data;
    }
  }
  void* const data = __real_mmap(place, size_bytes, protection, flags, fd, offset);
  CHECK(data != MAP_FAILED);
  registry().mappings.push_back({file.st_dev, file.st_ino, data, size_bytes, 1});
  return data;
}

int __wrap_munmap(void* data, size_t size_bytes) {
  {
    const std::lock_guard lock(registry().mutex);
    std::vector<Shared>& mappings = registry().mappings;
    for (auto shared = mappings.begin(); shared != mappings.end(); ++shared) {
      if (shared->data == data) {
        CHECK(shared->size_bytes == size_bytes);
        if (--shared->users > 0) {
          return 0;
        }
        mappings.erase(shared);
        break;
      }
    }
  }
  return __real_munmap(data, size_bytes);
}

int shared_mappings() {
  const std::lock_guard lock(registry().mutex);
  return static_cast<int>(registry().mappings.size());
}

int mapped_again() {
  const std::lock_guard lock(registry().mutex);
  return registry().mapped_again;
}
