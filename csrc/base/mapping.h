// Mapping: a range of mapped memory, of a memfd or anonymous.
#pragma once

#include <cstddef>
#include <memory>

#include "base/memfd.h"

namespace bucketwheel {

constexpr size_t kPageBytes = 4096;

// mmap() of `size_bytes` with the base at a huge page, so that the kernel may use huge pages from the first byte on. Null when
// the system refuses; errno says why.
std::byte* map_at_huge_page(size_t size_bytes, int protection, int flags, int fd);

// Unmaps at the end.
class Mapping {
 public:
  // Zero-filled memory of this process and its children.
  static std::shared_ptr<Mapping> anonymous(size_t size_bytes);
  // The first `size_bytes` of a memfd, shared. CommError when the file is smaller, cannot be mapped, or may be shrunk
  // by somebody: reading beyond its end would end the process.
  static std::shared_ptr<Mapping> of_file(int fd, size_t size_bytes, bool is_writable);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  Mapping(void* data, size_t size_bytes) : data_(static_cast<std::byte*>(data)), size_bytes_(size_bytes) {}
  std::byte* data_;
  size_t size_bytes_;
};

// As try_make_memfd(); CommError where that fails.
FileDescriptor make_memfd(const char* name, size_t size_bytes);

}  // namespace bucketwheel
