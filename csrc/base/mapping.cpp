#include "base/mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "base/align.h"
#include "base/error.h"

namespace bucketwheel {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

[[noreturn]] void throw_errno(const std::string& what, size_t size_bytes) {
  const std::string reason = std::generic_category().message(errno);
  throw CommError(what + " of " + std::to_string(size_bytes) + " bytes: " + reason);
}

}  // namespace

std::shared_ptr<Mapping> Mapping::anonymous(size_t size_bytes) {
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw_errno("cannot map memory", size_bytes);
  }
  return std::shared_ptr<Mapping>(new Mapping(data, size_bytes));
}

std::shared_ptr<Mapping> Mapping::of_file(int fd, size_t size_bytes, bool is_writable) {
  struct stat status{};
  if (fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) < size_bytes) {
    throw CommError("a peer's memory has " + std::to_string(status.st_size) + " bytes, it announced " +
                    std::to_string(size_bytes));
  }
  if (!is_size_final(fd)) {
    throw CommError("a peer's memory of " + std::to_string(size_bytes) + " bytes is not sealed: it could be cut off");
  }
  // At a multiple of a huge page, as the owner maps it: only then can the same huge pages serve here.
  const size_t slack = size_bytes >= kHugePageBytes ? kHugePageBytes : 0;
  void* range = mmap(nullptr, size_bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    throw_errno("cannot map shared memory", size_bytes);
  }
  auto* begin = static_cast<std::byte*>(range);
  const size_t lead =
      slack == 0 ? 0 : round_up(reinterpret_cast<size_t>(begin), kHugePageBytes) - reinterpret_cast<size_t>(begin);
  const int protection = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = mmap(begin + lead, size_bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    munmap(range, size_bytes + slack);
    errno = error;
    throw_errno("cannot map shared memory", size_bytes);
  }
  if (lead != 0) {
    munmap(begin, lead);
  }
  const size_t end = lead + round_up(size_bytes, kPageBytes);
  if (end < size_bytes + slack) {
    munmap(begin + end, size_bytes + slack - end);
  }
  if (!is_writable) {
    madvise(data, size_bytes, MADV_HUGEPAGE);  // a wish, as the owner's
  }
  return std::shared_ptr<Mapping>(new Mapping(data, size_bytes));
}

Mapping::~Mapping() { munmap(data_, size_bytes_); }

FileDescriptor make_memfd(const char* name, size_t size_bytes) {
  const char* failed = nullptr;
  FileDescriptor file = try_make_memfd(name, size_bytes, failed);
  if (failed != nullptr) {
    throw_errno(std::string("cannot make shared memory (") + failed + ")", size_bytes);
  }
  return file;
}

}  // namespace bucketwheel
