// Transport: how a communicator reaches its peers' memory, and knows that they live. One per backend.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/host/control.h"
#include "comm/operation.h"
#include "pool/pool.h"

namespace bucketwheel {

// The inputs of one peer as this rank reads them, by segment, and what keeps them mapped.
struct PeerInputs {
  std::vector<const std::byte*> begins;
  std::vector<std::shared_ptr<const void>> mappings;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* backend() const = 0;
  virtual const PoolRef& pool() const = 0;
  // Writes into this rank's descriptor where peers find the inputs; false when they must be staged.
  virtual bool describe_inputs(const Operation& op, RankRecord& own) = 0;
  // Finds the inputs that a peer described; false when a slab has not arrived yet (its arrival rings our doorbell).
  // CommError when the description makes no sense.
  virtual bool find_inputs(int peer, const RankRecord& theirs, const Operation& op, PeerInputs& out) = 0;
  // Whether the memory of our inputs goes away for the peers too when we free it.
  virtual bool shares_inputs() const = 0;
  // Ended without leave(). The doorbell rings when this turns true.
  virtual bool is_dead(int peer) const = 0;
  // For messages: how a dead peer ended.
  virtual std::string end_of(int) const { return "died"; }
  // For messages: "pid 1234".
  virtual std::string describe_peer(int peer) const = 0;
  // Says goodbye; no memory of ours is announced to peers any more.
  virtual void leave() noexcept = 0;
};

}  // namespace bucketwheel
