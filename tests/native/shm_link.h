// The sockets of one rank, and their other ends in the hands of a test, which is its peers.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/host/shm.h"
#include "comm/host/team.h"

namespace bucketwheel {

inline FileDescriptor memfd(size_t size_bytes, bool is_sealed = true) {
  FileDescriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(file.get(), static_cast<off_t>(size_bytes)) == 0);
  CHECK(!is_sealed || fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  return file;
}

// Rank 0 of a few, and the other ends of its sockets.
class ShmEnd {
 public:
  explicit ShmEnd(int peers = 1) : record_(std::make_unique<RankRecord>()) {
    std::vector<FileDescriptor> sockets(1);
    for (int i = 0; i < peers; ++i) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
      sockets.emplace_back(pair[0]);
      (i == 0 ? peer : others.emplace_back()).reset(pair[1]);
    }
    const std::vector<pid_t> pids(sockets.size(), getpid());
    links = std::make_unique<ShmLinks>(0, std::move(sockets), pids, *record_);
  }
  bool is_cut_off() const { return links->is_dead(1); }

 private:
  std::unique_ptr<RankRecord> record_;

 public:
  FileDescriptor peer;                 // of rank 1
  std::vector<FileDescriptor> others;  // of rank 2 and on
  std::unique_ptr<ShmLinks> links;
};

// Not under qemu, which keeps those open that did not fit in the receiver's message.
inline size_t open_files() {
  if (emulator() == "qemu") {
    return 0;
  }
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

}  // namespace bucketwheel
