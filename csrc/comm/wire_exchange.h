// WireExchange: moves the data of one operation on one rank over a Wire.
//
// [Note: wire] First the ranks tell each other what they are about to do, so that no message of an unexpected length is
// ever sent for. Then every rank sends each peer what the peer needs and nothing else: of a gather its shard, of a
// reduce-scatter the part that the peer sums, (world - 1) / world of the full buffer each way. Sums are made here, as on
// every backend ([Note: sums]): collectives of the transport would add in an order and a dtype of their own.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/chunks.h"
#include "comm/mapping.h"
#include "comm/operation.h"
#include "comm/wire.h"

namespace bucketwheel {

// Where the chunks of an operation lie that are on their way and are not sent from tensors, or received into them. Kept
// from operation to operation; pages that are never written to take no memory.
class WireRooms {
 public:
  // Chunks on their way at once: the next ones travel while one is summed.
  static constexpr uint64_t kAhead = 2;
  explicit WireRooms(int world);
  // Of what goes to one peer, or comes from it.
  size_t window_bytes() const { return window_bytes_; }
  std::byte* sent(uint64_t chunk, int peer) { return window(chunk % kAhead, peer); }
  std::byte* received(uint64_t chunk, int peer) { return window(kAhead + chunk % kAhead, peer); }

 private:
  std::byte* window(uint64_t room, int peer);

  const size_t world_;
  const size_t window_bytes_;
  std::shared_ptr<Mapping> memory_;  // from the first use on
};

class WireExchange {
 public:
  WireExchange(Wire& wire, WireRooms& rooms, const Operation& op, int rank, int world);
  // Returns when the outputs are complete and the inputs have been sent. Throws WireBroken, Failure (kMismatch), or what
  // the sink throws.
  void run();

 private:
  void meet_peers();
  std::unique_ptr<Wire::Transfer> start(uint64_t chunk);
  void add_messages(uint64_t chunk, int peer, std::vector<Wire::Message>& messages);
  void pack(uint64_t chunk, int peer);
  void take(uint64_t chunk);
  void scatter(uint64_t chunk, int from);
  void reduce(uint64_t chunk);

  bool copies() const { return op_.collective != Collective::kReduceScatter; }
  bool sends() const { return op_.collective != Collective::kBroadcast || rank_ == op_.root; }
  bool receives_from(int peer) const { return op_.collective != Collective::kBroadcast || peer == op_.root; }
  // What `peer` gets of a piece of ours, and where a piece of its goes in our output.
  const std::byte* input_for(int peer, const Piece& piece) const;
  std::byte* output_from(int peer, const Piece& piece) const;
  size_t bytes_of(const Piece& piece) const;
  size_t bytes_of(uint64_t chunk) const;
  bool is_packed(uint64_t chunk) const { return chunks_.end(chunk) - chunks_.begin(chunk) > 1; }

  Wire& wire_;
  WireRooms& rooms_;
  const Operation& op_;
  const int rank_;
  const int world_;
  const Chunks chunks_;
  std::vector<const std::byte*> sources_;
};

}  // namespace bucketwheel
