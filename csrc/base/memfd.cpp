#include "base/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

namespace bucketwheel {
namespace {

constexpr int kFinalSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

void FileDescriptor::reset(int fd) noexcept {
  if (fd_ >= 0) {
    ::close(fd_);
  }
  fd_ = fd;
}

FileDescriptor try_make_memfd(const char* name, size_t size_bytes, const char*& failed) {
  FileDescriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  failed = file.get() < 0                                               ? "memfd_create"
           : ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0 ? "ftruncate"
           : fcntl(file.get(), F_ADD_SEALS, kFinalSize) != 0            ? "fcntl(F_ADD_SEALS)"
                                                                        : nullptr;
  if (failed != nullptr) {
    const int error = errno;
    file.reset();
    errno = error;
  }
  return file;
}

bool is_size_final(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace bucketwheel
