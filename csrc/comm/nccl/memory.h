// Registered memory: slabs that NCCL may read and write in place from other GPUs (symmetric windows), and with which an
// all-gather can leave the copying to the copy engines.
//
// An operation has to find windows on all ranks or on none, at equal offsets. So the slabs of all ranks must be made by
// equal calls in one order, and become windows together, in NcclMemory::register_slabs().
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/nccl/session.h"
#include "pool/upstream.h"

namespace bucketwheel {

class NcclMemory final : public Upstream {
 public:
  explicit NcclMemory(std::shared_ptr<NcclSession> session);
  ~NcclMemory() override;

  // ncclMemAlloc, zeroed; not registered yet. PoolError when there is none left.
  SlabRef allocate(size_t size_bytes) override;

  // The sizes of the slabs that are not windows yet, in the order in which they were made.
  std::vector<size_t> new_slabs() const;
  // Collective. Makes windows of the first `count` of them. How many NCCL granted: it may refuse, on all ranks alike,
  // where GPUs cannot reach each other; those slabs stay plain memory.
  // No slab may be freed meanwhile.
  size_t register_slabs(size_t count);
  // Whether there are slabs, and all are in windows.
  bool is_registered() const;
  // The windows end; before the communicator does.
  void release_windows() noexcept;

 private:
  struct Windows;
  struct NcclSlab;
  const std::shared_ptr<NcclSession> session_;
  const std::shared_ptr<Windows> windows_;
};

}  // namespace bucketwheel
