// Mapping: a range of mapped memory, and the memfd it may come from.
#pragma once

#include <cstddef>
#include <memory>

namespace bucketwheel {

constexpr size_t kPageBytes = 4096;

// Unmaps at the end.
class Mapping {
 public:
  // Zero-filled memory of this process and its children.
  static std::shared_ptr<Mapping> anonymous(size_t size_bytes);
  // The first `size_bytes` of a memfd, shared. CommError when the file is smaller or cannot be mapped.
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

// Closes at the end. -1: none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1) noexcept;

 private:
  int fd_;
};

// An unnamed zero-filled file of fixed size that lives as long as somebody has it open or mapped.
FileDescriptor make_memfd(const char* name, size_t size_bytes);

}  // namespace bucketwheel
