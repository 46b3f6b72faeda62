// The `local` backend: the ranks are threads of one process and read each other's tensors where they are.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "comm/control.h"
#include "comm/mapping.h"

namespace bucketwheel {

class LocalWorld {
 public:
  // `stages_inputs`: through the staging buffers, as the shm backend does with foreign tensors (for tests).
  explicit LocalWorld(int world, bool stages_inputs = false);
  int world() const { return world_; }
  // The communicator of one rank, once per rank. Its operations meet those of the other ranks when these have joined.
  CommRef join(int rank, std::string name, std::chrono::nanoseconds timeout);

 private:
  const int world_;
  const bool stages_inputs_;
  const std::shared_ptr<Mapping> memory_;
  std::mutex mutex_;
  std::vector<bool> has_joined_;
};

}  // namespace bucketwheel
