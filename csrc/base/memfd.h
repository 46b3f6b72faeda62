// Memfds: unnamed files of memory whose size is final, and the descriptors that own them.
#pragma once

#include <cstddef>
#include <utility>

namespace bucketwheel {

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
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept;

 private:
  int fd_;
};

// A zero-filled memfd whose size nobody can change. It lives as long as somebody has it open or mapped. -1 when the system
// refuses: `failed` names the call, errno says why.
FileDescriptor try_make_memfd(const char* name, size_t size_bytes, const char*& failed);

// Whether the file is sealed against shrinking: a peer that shrinks a file that is mapped here would end this process.
bool is_size_final(int fd);

}  // namespace bucketwheel
