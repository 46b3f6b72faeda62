// The `local` backend: the ranks are threads of one process and read each other's tensors where they are.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/mapping.h"
#include "comm/comm.h"
#include "comm/host/team.h"

namespace bucketwheel {

class HostComm;
class LocalCudaBoard;

class LocalWorld {
 public:
  // `stages_inputs`: through the staging buffers, as the shm backend does with foreign tensors (for tests).
  explicit LocalWorld(int world, bool stages_inputs = false);
  int world() const { return world_; }
  // The communicator of one rank, once per rank. Its operations meet those of the other ranks when these have joined.
  CommRef join(int rank, std::string name, std::chrono::nanoseconds timeout);
  // The same for tensors of one CUDA device: comm_local_cuda.h. `pool` is of that device.
  CommRef join_cuda(int rank, std::string name, std::chrono::nanoseconds timeout, PoolRef pool);

 private:
  std::shared_ptr<HostComm> make_host(int rank, std::string name, std::chrono::nanoseconds timeout);

  const int world_;
  const bool stages_inputs_;
  const std::string id_;  // of its communicators' Health
  const std::shared_ptr<Mapping> memory_;
  std::mutex mutex_;
  std::vector<bool> has_joined_;
  std::shared_ptr<LocalCudaBoard> board_;
};

}  // namespace bucketwheel
