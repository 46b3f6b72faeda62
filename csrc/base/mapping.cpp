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

std::byte* map_at_huge_page(size_t size_bytes, int protection, int flags, int fd) {
  const size_t slack = size_bytes >= kHugePageBytes ? kHugePageBytes : 0;
  void* range = mmap(nullptr, size_bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return nullptr;
  }
  auto* const begin = static_cast<std::byte*>(range);
  const auto start = reinterpret_cast<uintptr_t>(begin);
  const size_t lead = slack == 0 ? 0 : round_up(start, kHugePageBytes) - start;
  void* data = mmap(begin + lead, size_bytes, protection, flags | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    munmap(range, size_bytes + slack);
    errno = error;
    return nullptr;
  }
  if (lead != 0) {
    munmap(begin, lead);
  }
  const size_t end = lead + round_up(size_bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  if (end < size_bytes + slack) {
    munmap(begin + end, size_bytes + slack - end);
  }
  return static_cast<std::byte*>(data);
}

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
    throw CommError("a peer's memory has " + std::to_string(status.st_size) + " bytes, but the peer announced " +
                    std::to_string(size_bytes));
  }
  if (!is_size_final(fd)) {
    throw CommError("a peer's memory of " + std::to_string(size_bytes) + " bytes is not sealed against truncation");
  }
  // At a multiple of a huge page, as the owner maps it: only then can the same huge pages serve here.
  std::byte* const data =
      map_at_huge_page(size_bytes, is_writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd);
  if (data == nullptr) {
    throw_errno("cannot map shared memory", size_bytes);
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
