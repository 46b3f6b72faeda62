// WireExchange: moves the data of one operation on one rank over a Wire.
//
// [Note: wire] First the ranks tell each other what they are about to do, so that no message of an unexpected length is
// ever sent for. Then every rank sends each peer what the peer needs and nothing else: of a gather its shard, of a
// reduce-scatter the part that the peer sums, (world - 1) / world of the full buffer each way. Sums are made here, as on
// every backend ([Note: sums]): collectives of the transport would add in an order and a dtype of their own.
//
// [Note: proof of receipt] Nobody waits for what it sends, only for what it receives, for that ends when the peer dies.
// A message has arrived once its receiver says something that it says only after it: chunk c + kAhead is begun after
// chunk c has come, and a farewell ends the operation once everything has. So every chunk brings a message from each
// peer that it is sent to, if only of one byte, and inputs may be overwritten when all farewells have come. That the own
// farewell has arrived is known when the next operation begins.
#pragma once

#include <array>
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
  // Of those that have been sent, as many may not have arrived.
  static constexpr uint64_t kSent = 2 * kAhead;
  explicit WireRooms(int world);
  // Of what goes to one peer, or comes from it.
  size_t window_bytes() const { return window_bytes_; }
  std::byte* sent(uint64_t chunk, int peer) { return window(chunk % kSent, peer); }
  std::byte* received(uint64_t chunk, int peer) { return window(kSent + chunk % kAhead, peer); }
  // A message that says nothing: sent, or received.
  std::byte* token(bool is_sent) { return &tokens_[is_sent ? 0 : 1]; }
  std::unique_ptr<Wire::Transfer>& farewell() { return farewell_; }

 private:
  std::byte* window(uint64_t room, int peer);

  const size_t world_;
  const size_t window_bytes_;
  std::shared_ptr<Mapping> memory_;  // from the first use on
  std::array<std::byte, 2> tokens_{};
  std::unique_ptr<Wire::Transfer> farewell_;  // of the last operation
};

class WireExchange {
  // What ranks tell each other first.
  struct Hello {
    uint64_t seq;
    uint64_t signature;
    Description description;
  };

 public:
  WireExchange(Wire& wire, WireRooms& rooms, const Operation& op, int rank, int world);
  // Returns when the outputs are complete and the inputs have arrived. Throws WireBroken, Failure (kMismatch), or what the
  // sink throws.
  void run();

 private:
  void meet_peers();
  void part_from_peers();
  void settle_all_but(size_t last);
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
  Hello own_;
  std::unique_ptr<Wire::Transfer> hello_;
  std::deque<std::unique_ptr<Wire::Transfer>> sent_;  // chunks that have come, of which what was sent may not have arrived
};

}  // namespace bucketwheel
