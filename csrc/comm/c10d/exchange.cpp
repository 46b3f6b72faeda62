#include "comm/c10d/exchange.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "base/align.h"
#include "base/platform.h"
#include "comm/failure.h"
#include "comm/outputs.h"

namespace bucketwheel {
namespace {

// What the ranks tell each other first.
struct Call {
  uint64_t seq;
  uint64_t signature;
  Description description;
};
static_assert(std::is_trivially_copyable_v<Call>);

// From here on copying costs more than an all_to_all for each peer does, whose messages grow with the square of the world.
constexpr size_t kInPlaceBytes = size_t{256} << 10;
constexpr int kInPlaceWorld = 4;

size_t window_bytes_of(const ProcessGroup& group, int world) {
  const size_t peers = static_cast<size_t>(std::max(world - 1, 1));
  return group.room_bytes() / peers / kCacheLineBytes * kCacheLineBytes;
}

size_t room_of(uint64_t chunk) { return chunk % ProcessGroup::kRooms; }

}  // namespace

C10dExchange::C10dExchange(ProcessGroup& group, const Operation& op, int rank, int world, Await await)
    : group_(group),
      op_(op),
      rank_(rank),
      world_(world),
      await_(std::move(await)),
      chunks_(op, window_bytes_of(group, world)) {}

void C10dExchange::run() {
  const IeeeFloats ieee;
  if (op_.collective == Collective::kAllGather) {
    copy_own_part(op_, rank_);
  }
  if (world_ > 1) {
    compare_calls();
  }
  uint64_t next = 0;
  for (uint64_t chunk = 0; chunk < chunks_.count(); ++chunk) {
    for (; world_ > 1 && next < std::min(chunks_.count(), chunk + ProcessGroup::kRooms); ++next) {
      start(next);
    }
    if (world_ > 1) {
      await_(room_of(chunk));
    }
    take(chunk);
  }
  if (op_.sink && !op_.reduces()) {
    feed_gathered(op_);
  }
}

void C10dExchange::compare_calls() {
  constexpr size_t kRoom = 0;
  const Call own{op_.seq, op_.signature, op_.description()};
  const ProcessGroup::Room& room = group_.room(kRoom);
  for (size_t i = 0; i < static_cast<size_t>(world_ - 1); ++i) {
    std::memcpy(room.sent + i * sizeof(Call), &own, sizeof(Call));
  }
  const std::vector<size_t> sizes = for_each_peer(sizeof(Call));
  group_.start({.room = kRoom, .sent = sizes, .received = sizes});
  await_(kRoom);
  std::vector<Call> calls(static_cast<size_t>(world_ - 1), own);
  std::memcpy(calls.data(), room.received, calls.size() * sizeof(Call));
  calls.insert(calls.begin() + rank_, own);
  const auto agrees = [&](const Call& one) { return one.seq == own.seq && one.signature == own.signature; };
  if (!std::ranges::all_of(calls, agrees)) {
    std::vector<std::string> texts;
    std::ranges::transform(calls, std::back_inserter(texts), [](const Call& one) { return text_of(one.description); });
    throw Failure{FailureKind::kMismatch, mismatch_text(texts), -1, op_.seq};
  }
}

void C10dExchange::start(uint64_t chunk) {
  const Piece* const first = chunks_.begin(chunk);
  const bool is_large = world_ == 2 || (first->size_bytes >= kInPlaceBytes && world_ <= kInPlaceWorld);
  const bool is_one = first + 1 == chunks_.end(chunk) && is_large;
  is_one ? start_in_place(chunk) : start_packed(chunk);
}

void C10dExchange::start_packed(uint64_t chunk) {
  const size_t room = room_of(chunk);
  const size_t bytes = bytes_of(chunk);
  for (int peer = 0; op_.has_input(rank_) && peer < world_; ++peer) {
    std::byte* const to = group_.room(room).sent + place_of(peer) * bytes;
    for (const Piece* piece = chunks_.begin(chunk); peer != rank_ && piece != chunks_.end(chunk); ++piece) {
      std::memcpy(to + piece->offset_bytes, input_for(peer, *piece), piece->size_bytes);
    }
  }
  std::vector<size_t> received = for_each_peer(bytes);
  for (int peer = 0; peer < world_; ++peer) {
    if (!op_.has_input(peer)) {
      received[static_cast<size_t>(peer)] = 0;
    }
  }
  group_.start({.room = room, .sent = for_each_peer(op_.has_input(rank_) ? bytes : 0), .received = received});
}

void C10dExchange::start_in_place(uint64_t chunk) {
  const Piece& piece = *chunks_.begin(chunk);
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_;
    const int from = (rank_ + world_ - step) % world_;
    group_.start({.room = room_of(chunk),
                  .from = input_for(to, piece),
                  .owner = op_.owner,
                  .into = received_at(from, bytes_of(chunk)),
                  .sent = for_one(to, op_.has_input(rank_) ? piece.size_bytes : 0),
                  .received = for_one(from, op_.has_input(from) ? piece.size_bytes : 0)});
  }
}

std::vector<size_t> C10dExchange::for_each_peer(size_t bytes) const {
  std::vector<size_t> sizes(static_cast<size_t>(world_), bytes);
  sizes[static_cast<size_t>(rank_)] = 0;
  return sizes;
}

std::vector<size_t> C10dExchange::for_one(int peer, size_t bytes) const {
  std::vector<size_t> sizes(static_cast<size_t>(world_));
  sizes[static_cast<size_t>(peer)] = bytes;
  return sizes;
}

void C10dExchange::take(uint64_t chunk) {
  if (op_.reduces()) {
    reduce(chunk);
    return;
  }
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != rank_ && op_.has_input(peer)) {
      scatter(chunk, peer);
    }
  }
}

void C10dExchange::scatter(uint64_t chunk, int from) {
  const std::byte* const data = group_.room(room_of(chunk)).received + received_at(from, bytes_of(chunk));
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    put_gathered(op_, piece->pair, op_.place_of(from, piece->pair) + piece->begin_bytes, data + piece->offset_bytes,
                 piece->size_bytes);
  }
}

void C10dExchange::reduce(uint64_t chunk) {
  std::vector<const std::byte*> sources(static_cast<size_t>(world_));
  const std::byte* const data = group_.room(room_of(chunk)).received;
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    for (int r = 0; r < world_; ++r) {
      sources[static_cast<size_t>(r)] =
          r == rank_ ? input_for(r, *piece) : data + received_at(r, bytes_of(chunk)) + piece->offset_bytes;
    }
    store_sums(op_, piece->pair, piece->begin, piece->numel, sources);
  }
}

const std::byte* C10dExchange::input_for(int peer, const Piece& piece) const {
  const size_t part = op_.reduces() ? static_cast<size_t>(peer) : 0;
  return op_.inputs[piece.pair] + part * op_.pairs[piece.pair].shard.size_bytes() + piece.begin_bytes;
}

size_t C10dExchange::received_at(int peer, size_t bytes) const {
  return op_.collective == Collective::kBroadcast ? 0 : place_of(peer) * bytes;
}

// Whole cache lines, so that what lies behind it is aligned.
size_t C10dExchange::bytes_of(uint64_t chunk) const {
  const Piece& last = *(chunks_.end(chunk) - 1);
  return round_up(last.offset_bytes + last.size_bytes, kCacheLineBytes);
}

}  // namespace bucketwheel
