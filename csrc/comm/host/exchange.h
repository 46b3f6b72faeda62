// Exchange: moves the data of one operation on one rank.
//
// [Note: pull] Every rank reads its peers' inputs and writes its own outputs; nobody writes into a peer's memory.
// Inputs that peers can map are read where they are (direct). Other inputs go through a few staging buffers per
// rank in turn: while peers read chunk c, the owner copies chunk c + 1 into the next one. Whether a rank's inputs are direct or
// staged is its own affair, operation by operation, and told in its descriptor.
#pragma once

#include <vector>

#include "comm/chunks.h"
#include "comm/host/team.h"
#include "comm/operation.h"

namespace bucketwheel {

class Exchange {
 public:
  Exchange(Team& team, const Operation& op, Deadline deadline);
  // Returns when all ranks have finished the operation: the outputs are complete, the inputs are nobody's any more.
  // Throws Failure, CommError from the transport, or what the sink throws.
  void run();

 private:
  struct Peer {
    bool has_arrived = false;
    bool is_direct = false;
    PeerInputs inputs;
  };

  void enter();
  void meet_peers();    // an all-gather copies from direct peers as they arrive
  void meet(int rank);  // checks the signature and finds the inputs
  [[noreturn]] void throw_mismatch();
  void pass_chunks();  // everything that is staged
  void finish();

  void stage(uint64_t chunk);
  void gather_direct(int rank);
  void gather_staged(int rank, uint64_t chunk);
  void reduce_all();
  void reduce_chunk(uint64_t chunk);

  const std::byte* part_of(int rank, size_t pair) const;  // what this rank shall own of a direct rank's input
  size_t window_of(int owner, int reader) const;          // offset in the owner's staging slot
  Team::Wait wait() const { return {op_.seq, deadline_}; }

  Team& team_;
  const Operation& op_;
  const Deadline deadline_;
  const size_t window_bytes_;
  std::unique_ptr<const Chunks> chunks_;  // made when something is staged
  bool is_staged_ = false;                // our own inputs
  std::vector<Peer> peers_;
  std::vector<const std::byte*> sources_;
};

}  // namespace bucketwheel
