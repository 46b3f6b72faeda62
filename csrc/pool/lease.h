// Lease: one live period of a range of pool memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device/device.h"
#include "pool/upstream.h"

namespace bucketwheel {

class Pool;

class Lease {
 public:
  // A lease dropped without release() is released now and counted as dropped; but while a CUDA graph is captured in its
  // stream, it stays live for good.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  const std::string& key() const;
  size_t size_bytes() const;    // what was asked for
  std::byte* data() const;      // UseAfterRelease once released
  const SlabRef& slab() const;  // the slab it lies in
  size_t offset_bytes() const;  // in the slab
  DeviceId device() const;
  bool is_live() const;

  // Ends the lease. Its bytes may be given to the next owner at once; the next owner's stream waits for `after` (the
  // completion of the last use) before touching them. No event: the caller says that all use has ended.
  // ReleasedTwice when called again. CaptureError, and the lease stays live, for an event that is part of a CUDA graph.
  void release(EventRef after = nullptr);

 private:
  friend class Pool;
  struct State;
  explicit Lease(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};
using LeaseRef = std::shared_ptr<Lease>;

}  // namespace bucketwheel
