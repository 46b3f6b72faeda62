#include "base/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace bucketwheel {
namespace {

constexpr int kFinalSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

enum class Sealing { kUnknown, kThere, kMissing };

std::atomic<Sealing>& known_sealing() {
  static std::atomic<Sealing> known{Sealing::kUnknown};
  return known;
}

// Whether a memfd that was just made is sealed; errno says why not. The first one shows whether the system has seals,
// unless it could not be made, or not be sealed for another reason.
bool seal(int fd) {
  const bool is_sealed = fcntl(fd, F_ADD_SEALS, kFinalSize) == 0;
  if (is_sealed || errno == EINVAL) {
    Sealing unknown = Sealing::kUnknown;
    known_sealing().compare_exchange_strong(unknown, is_sealed ? Sealing::kThere : Sealing::kMissing);
  }
  return is_sealed;
}

}  // namespace

void FileDescriptor::reset(int fd) noexcept {
  if (fd_ >= 0) {
    ::close(fd_);
  }
  fd_ = fd;
}

FileDescriptor try_make_memfd(const char* name, size_t size_bytes, const char*& failed) {
  FileDescriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  failed = nullptr;
  if (file.get() < 0) {
    failed = "memfd_create";
  } else if (ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0) {
    failed = "ftruncate";
  } else if (!seal(file.get())) {
    const int error = errno;
    if (seals_memfds()) {
      failed = "fcntl(F_ADD_SEALS)";
    }
    errno = error;
  }
  if (failed != nullptr) {
    const int error = errno;
    file.reset();
    errno = error;
  }
  return file;
}

bool seals_memfds() {
  if (known_sealing() == Sealing::kUnknown) {
    const FileDescriptor probe(memfd_create("bucketwheel-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (probe.get() >= 0) {
      seal(probe.get());
    }
  }
  return known_sealing() != Sealing::kMissing;
}

bool is_size_final(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 ? (seals & F_SEAL_SHRINK) != 0 || !seals_memfds() : !seals_memfds();
}

}  // namespace bucketwheel
