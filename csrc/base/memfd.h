// Memfds: unnamed files of memory whose size is final, and the descriptors that own them.
#pragma once

#include <cstddef>

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
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1) noexcept;

 private:
  int fd_;
};

// A zero-filled memfd of fixed size that lives as long as somebody has it open or mapped; where the system can seal
// (seals_memfds()), nobody can change its size. -1 when the system refuses: `failed` names the call, errno says why.
FileDescriptor try_make_memfd(const char* name, size_t size_bytes, const char*& failed);

// Whether the system keeps the size of a memfd from being changed. Found by trying, once; true as long as trying was not
// possible, where no descriptor was left: then files that are not sealed are not to be trusted either.
bool seals_memfds();

// Whether nobody can shrink the file under a mapping, as far as the system can say: sealed, or there are no seals. Where
// there are none, a peer that shrinks what it has shared ends us with SIGBUS; peers are processes of our user that know
// the communicator's secret.
bool is_size_final(int fd);

}  // namespace bucketwheel
