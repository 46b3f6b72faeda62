// The `shm` backend: the ranks are processes of one host that map each other's memory.
//
// Nothing has a name in the file system: memory is memfds that travel over connected sockets, so nothing is left behind
// however a process ends, and no other user can reach it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/comm.h"

namespace bucketwheel {

struct ShmOptions {
  int rank = 0;
  int world = 1;
  // Connected SOCK_SEQPACKET Unix sockets by rank, our own entry -1, whose other ends are the peers `pids`.
  std::vector<int> sockets;
  std::vector<pid_t> pids;
  std::string name;
  std::chrono::nanoseconds timeout{};  // of an operation, from when the stream reaches it; also of this call
  std::string id{};                    // of Health
  Deadline until{};                    // of this call, if that is earlier
};

// CommError with the reason where this system cannot share as much memory as a communicator of `world` ranks needs.
void expect_shared_memory(int world);

// Called by all ranks; returns when the control segment is mapped here. Takes the sockets over, also when it throws.
CommRef make_shm_comm(const ShmOptions& options);

}  // namespace bucketwheel
