#include "comm/c10d/wire_exchange.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/platform.h"
#include "comm/failure.h"
#include "comm/outputs.h"

namespace bucketwheel {
namespace {

// The chunks on their way have this many bytes at most, of all peers together: messages long enough that their cost does
// not count, and room that is small beside a model. Never less than a sink's block of the largest dtype.
constexpr size_t kRoomBytes = size_t{8} << 20;
constexpr size_t kLeastWindowBytes = size_t{64} << 10;

size_t wire_window_bytes(int world) {
  const size_t peers = static_cast<size_t>(std::max(world - 1, 1));
  return std::max(kRoomBytes / peers / kCacheLineBytes * kCacheLineBytes, kLeastWindowBytes);
}

}  // namespace

WireRooms::WireRooms(int world) : world_(static_cast<size_t>(world)), window_bytes_(wire_window_bytes(world)) {}

std::byte* WireRooms::window(uint64_t room, int peer) {
  if (!memory_) {
    memory_ = Mapping::anonymous((kSent + kAhead) * world_ * window_bytes_);
  }
  return memory_->data() + (room * world_ + static_cast<size_t>(peer)) * window_bytes_;
}

void WireRooms::add_chunk(std::unique_ptr<Wire::Transfer> chunk) {
  chunks_.push_back(std::move(chunk));
  for (; chunks_.size() > kAhead; chunks_.pop_front()) {
    chunks_.front()->settle();
  }
}

void WireRooms::settle() {
  if (!farewell_) {
    return;
  }
  farewell_->receive();
  hello_->settle();
  for (; !chunks_.empty(); chunks_.pop_front()) {
    chunks_.front()->settle();
  }
  if (last_farewell_) {
    last_farewell_->settle();
  }
  hello_.reset();
  last_farewell_ = std::move(farewell_);
}

void WireRooms::forget() {
  hello_.reset();
  chunks_.clear();
  farewell_.reset();
  last_farewell_.reset();
}

WireExchange::WireExchange(Wire& wire, WireRooms& rooms, const Operation& op, int rank, int world)
    : wire_(wire),
      rooms_(rooms),
      op_(op),
      rank_(rank),
      world_(world),
      chunks_(op, rooms.window_bytes()),
      sources_(static_cast<size_t>(world)) {}

WireExchange::~WireExchange() {
  if (!is_over_) {
    rooms_.forget();
  }
}

void WireExchange::run() {
  const IeeeFloats ieee;
  meet_peers();
  if (op_.collective == Collective::kAllGather) {
    copy_own_part(op_, rank_);
  }
  std::deque<std::unique_ptr<Wire::Transfer>> under_way;
  uint64_t next = 0;
  for (uint64_t chunk = 0; chunk < chunks_.count(); ++chunk) {
    while (next < chunks_.count() && next < chunk + WireRooms::kAhead) {
      under_way.push_back(start(next++));
    }
    under_way.front()->receive();
    rooms_.add_chunk(std::move(under_way.front()));
    under_way.pop_front();
    take(chunk);
  }
  part_from_peers();
  is_over_ = true;
  if (op_.sink && copies()) {
    feed_gathered(op_);
  }
}

void WireExchange::meet_peers() {
  WireHello& own = rooms_.hello(op_.seq);
  own = {op_.seq, op_.signature, op_.description()};
  std::vector<WireHello> hellos(static_cast<size_t>(world_), own);
  std::vector<Wire::Message> messages;
  for (int i = 1; i < world_; ++i) {
    const int peer = (rank_ + i) % world_;
    auto* theirs = reinterpret_cast<std::byte*>(&hellos[static_cast<size_t>(peer)]);
    messages.push_back({peer, false, theirs, sizeof(WireHello)});
    messages.push_back({peer, true, reinterpret_cast<std::byte*>(&own), sizeof(WireHello)});
  }
  auto hello = wire_.start(messages);
  rooms_.settle();
  hello->receive();
  rooms_.add_hello(std::move(hello));
  const auto agrees = [&](const WireHello& one) { return one.seq == own.seq && one.signature == own.signature; };
  if (!std::ranges::all_of(hellos, agrees)) {
    std::string text = "ranks called different operations:";
    for (int r = 0; r < world_; ++r) {
      text += "\n  rank " + std::to_string(r) + ": " + text_of(hellos[static_cast<size_t>(r)].description);
    }
    throw Failure{FailureKind::kMismatch, std::move(text), -1, op_.seq};
  }
}

void WireExchange::part_from_peers() {
  std::vector<Wire::Message> messages;
  for (int i = 1; i < world_; ++i) {
    const int peer = (rank_ + i) % world_;
    messages.push_back({peer, false, nullptr, 0});
    messages.push_back({peer, true, nullptr, 0});
  }
  rooms_.add_farewell(wire_.start(messages));
  if (chunks_.count() > 1) {
    rooms_.settle();
  }
}

std::unique_ptr<Wire::Transfer> WireExchange::start(uint64_t chunk) {
  std::vector<Wire::Message> messages;
  if (is_packed(chunk) && copies() && sends()) {
    pack(chunk, rank_);  // the same goes to all
  }
  // Starting behind our own rank, so that ranks do not all send to the same peer first.
  for (int i = 1; i < world_; ++i) {
    add_messages(chunk, (rank_ + i) % world_, messages);
  }
  return wire_.start(messages);
}

void WireExchange::add_messages(uint64_t chunk, int peer, std::vector<Wire::Message>& messages) {
  const size_t bytes = bytes_of(chunk);
  const Piece& first = *chunks_.begin(chunk);
  if (receives_from(peer)) {
    const bool is_direct = copies() && is_whole(chunk);
    messages.push_back({peer, false, is_direct ? output_from(peer, first) : rooms_.received(chunk, peer), bytes});
  } else if (sends()) {
    messages.push_back({peer, false, nullptr, 0});
  }
  if (sends()) {
    auto* data = const_cast<std::byte*>(input_for(peer, first));
    if (is_packed(chunk)) {
      data = rooms_.sent(chunk, copies() ? rank_ : peer);
    }
    if (is_packed(chunk) && !copies()) {
      pack(chunk, peer);
    }
    messages.push_back({peer, true, data, bytes});
  } else if (receives_from(peer)) {
    messages.push_back({peer, true, nullptr, 0});
  }
}

void WireExchange::pack(uint64_t chunk, int peer) {
  std::byte* const room = rooms_.sent(chunk, peer);
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    std::memcpy(room + piece->offset_bytes, input_for(peer, *piece), bytes_of(*piece));
  }
}

void WireExchange::take(uint64_t chunk) {
  if (!copies()) {
    reduce(chunk);
    return;
  }
  for (int peer = 0; !is_whole(chunk) && peer < world_; ++peer) {
    if (peer != rank_ && receives_from(peer)) {
      scatter(chunk, peer);
    }
  }
}

void WireExchange::scatter(uint64_t chunk, int from) {
  const std::byte* const data = rooms_.received(chunk, from);
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    put_gathered(op_, piece->segment, output_from(from, *piece), data + piece->offset_bytes, bytes_of(*piece));
  }
}

void WireExchange::reduce(uint64_t chunk) {
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    for (int r = 0; r < world_; ++r) {
      sources_[static_cast<size_t>(r)] =
          r == rank_ ? input_for(r, *piece) : rooms_.received(chunk, r) + piece->offset_bytes;
    }
    store_sums(op_, piece->segment, piece->begin, piece->numel, sources_);
  }
}

const std::byte* WireExchange::input_for(int peer, const Piece& piece) const {
  const View& shard = op_.segments[piece.segment].shard;
  const size_t part = copies() ? 0 : static_cast<size_t>(peer);
  return op_.inputs[piece.segment] + part * shard.size_bytes() +
         static_cast<size_t>(piece.begin) * size_of(shard.dtype);
}

std::byte* WireExchange::output_from(int peer, const Piece& piece) const {
  const Segment& segment = op_.segments[piece.segment];
  const size_t part = op_.collective == Collective::kBroadcast ? 0 : static_cast<size_t>(peer);
  return static_cast<std::byte*>(segment.full.data) + part * segment.shard.size_bytes() +
         static_cast<size_t>(piece.begin) * size_of(segment.shard.dtype);
}

size_t WireExchange::bytes_of(const Piece& piece) const {
  return static_cast<size_t>(piece.numel) * size_of(op_.segments[piece.segment].shard.dtype);
}

// From the first piece to the end of the last.
size_t WireExchange::bytes_of(uint64_t chunk) const {
  const Piece& last = *(chunks_.end(chunk) - 1);
  return last.offset_bytes + bytes_of(last);
}

}  // namespace bucketwheel
