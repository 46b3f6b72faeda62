// C10dExchange: moves the data of one operation on one rank, by all_to_alls of a process group.
//
// [Note: all_to_all] First the ranks tell each other what they are about to do, so that no all_to_all begins whose sizes
// differ between ranks. Then the data goes in chunks through the rooms of the group: of a gather, every peer gets this
// rank's shard; of a reduce-scatter, what it sums. Sums are made here, as on every backend ([Note: sums]): the group's
// own reductions would add in the tensors' dtype, in an order of their own. What is received lies in the rooms first, so the
// group never writes into a tensor of the caller's, whatever it does after a failure. What is sent is copied into them
// where a chunk has several pieces; a large one is sent from where it lies, to one peer after the other, for an all_to_all
// sends from one place.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/c10d/process_group.h"
#include "comm/chunks.h"
#include "comm/operation.h"

namespace bucketwheel {

class C10dExchange {
 public:
  // `await(room)` returns when the all_to_all in `room` is over. Throws what ends the wait.
  using Await = std::function<void(size_t)>;
  C10dExchange(ProcessGroup& group, const Operation& op, int rank, int world, Await await);
  // Returns when the outputs are complete. Throws what `group`, `await` and the sink throw, and Failure (kMismatch).
  void run();

 private:
  void compare_calls();
  void start(uint64_t chunk);
  void take(uint64_t chunk);
  void scatter(uint64_t chunk, int from);
  void reduce(uint64_t chunk);

  void start_packed(uint64_t chunk);
  void start_in_place(uint64_t chunk);
  std::vector<size_t> for_each_peer(size_t bytes) const;  // by rank, none for the own one
  std::vector<size_t> for_one(int peer, size_t bytes) const;
  const std::byte* input_for(int peer, const Piece& piece) const;  // what `peer` gets of a piece of ours
  // Where in the rooms.
  size_t place_of(int peer) const { return static_cast<size_t>(peer < rank_ ? peer : peer - 1); }
  size_t received_at(int peer, size_t bytes) const;
  size_t bytes_of(uint64_t chunk) const;  // for each peer

  ProcessGroup& group_;
  const Operation& op_;
  const int rank_;
  const int world_;
  const Await await_;
  const Chunks chunks_;
};

}  // namespace bucketwheel
