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
// peer that it is sent to, if only an empty one. Where tensors are sent from where they are, the operation ends when all
// farewells have come; one of a single chunk sends a copy, and does not wait: the next one does, or close().
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/mapping.h"
#include "comm/c10d/wire.h"
#include "comm/chunks.h"
#include "comm/operation.h"

namespace bucketwheel {

// What ranks tell each other first.
struct WireHello {
  uint64_t seq;
  uint64_t signature;
  Description description;
};

// Where the chunks of an operation lie that are on their way and are not sent from tensors, or received into them, and
// what was sent that may not have arrived. Kept from operation to operation; pages that are never written to take no
// memory.
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
  WireHello& hello(uint64_t seq) { return hellos_[seq % hellos_.size()]; }

  // What an operation has sent, in this order; all but the farewell have been received from the peers too.
  void add_hello(std::unique_ptr<Wire::Transfer> hello) { hello_ = std::move(hello); }
  void add_chunk(std::unique_ptr<Wire::Transfer> chunk);
  void add_farewell(std::unique_ptr<Wire::Transfer> farewell) { farewell_ = std::move(farewell); }
  // Blocks until the farewells of the peers have come: everything but the own farewell has arrived. Throws WireBroken.
  void settle();
  // It may never arrive; nobody reads it any more.
  void forget();

 private:
  std::byte* window(uint64_t room, int peer);

  const size_t world_;
  const size_t window_bytes_;
  std::shared_ptr<Mapping> memory_;  // from the first use on
  std::array<WireHello, 2> hellos_{};
  std::unique_ptr<Wire::Transfer> hello_;
  std::deque<std::unique_ptr<Wire::Transfer>> chunks_;
  std::unique_ptr<Wire::Transfer> farewell_;
  std::unique_ptr<Wire::Transfer> last_farewell_;  // of the operation before: it has come when the next farewells have
};

class WireExchange {
 public:
  WireExchange(Wire& wire, WireRooms& rooms, const Operation& op, int rank, int world);
  ~WireExchange();
  // Returns when the outputs are complete and the inputs have arrived, or been copied. Throws WireBroken, Failure
  // (kMismatch), or what the sink throws.
  void run();

 private:
  void meet_peers();
  void part_from_peers();
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
  bool is_whole(uint64_t chunk) const { return chunks_.end(chunk) - chunks_.begin(chunk) == 1; }  // of one tensor
  bool is_packed(uint64_t chunk) const { return chunks_.count() == 1 || !is_whole(chunk); }

  Wire& wire_;
  WireRooms& rooms_;
  const Operation& op_;
  const int rank_;
  const int world_;
  const Chunks chunks_;
  std::vector<const std::byte*> sources_;
  bool is_over_ = false;
};

}  // namespace bucketwheel
