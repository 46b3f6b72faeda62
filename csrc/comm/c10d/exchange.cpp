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
  if (op_.sink && copies()) {
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
  group_.start(kRoom, sizes, sizes);
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
  const size_t bytes = bytes_of(chunk);
  for (int peer = 0; has_input(rank_) && peer < world_; ++peer) {
    for (const Piece* piece = chunks_.begin(chunk); peer != rank_ && piece != chunks_.end(chunk); ++piece) {
      std::memcpy(sent_to(peer, room_of(chunk), bytes) + piece->offset_bytes, input_for(peer, *piece),
                  bytes_of(*piece));
    }
  }
  std::vector<size_t> received = for_each_peer(bytes);
  for (int peer = 0; peer < world_; ++peer) {
    if (!has_input(peer)) {
      received[static_cast<size_t>(peer)] = 0;
    }
  }
  group_.start(room_of(chunk), for_each_peer(has_input(rank_) ? bytes : 0), received);
}

std::vector<size_t> C10dExchange::for_each_peer(size_t bytes) const {
  std::vector<size_t> sizes(static_cast<size_t>(world_), bytes);
  sizes[static_cast<size_t>(rank_)] = 0;
  return sizes;
}

void C10dExchange::take(uint64_t chunk) {
  if (!copies()) {
    reduce(chunk);
    return;
  }
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != rank_ && has_input(peer)) {
      scatter(chunk, peer);
    }
  }
}

void C10dExchange::scatter(uint64_t chunk, int from) {
  const std::byte* const data = received_from(from, room_of(chunk), bytes_of(chunk));
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    put_gathered(op_, piece->segment, output_from(from, *piece), data + piece->offset_bytes, bytes_of(*piece));
  }
}

void C10dExchange::reduce(uint64_t chunk) {
  std::vector<const std::byte*> sources(static_cast<size_t>(world_));
  for (const Piece* piece = chunks_.begin(chunk); piece != chunks_.end(chunk); ++piece) {
    for (int r = 0; r < world_; ++r) {
      sources[static_cast<size_t>(r)] =
          r == rank_ ? input_for(r, *piece) : received_from(r, room_of(chunk), bytes_of(chunk)) + piece->offset_bytes;
    }
    store_sums(op_, piece->segment, piece->begin, piece->numel, sources);
  }
}

const std::byte* C10dExchange::input_for(int peer, const Piece& piece) const {
  const View& shard = op_.segments[piece.segment].shard;
  const size_t part = copies() ? 0 : static_cast<size_t>(peer);
  return op_.inputs[piece.segment] + part * shard.size_bytes() +
         static_cast<size_t>(piece.begin) * size_of(shard.dtype);
}

std::byte* C10dExchange::output_from(int peer, const Piece& piece) const {
  const Segment& segment = op_.segments[piece.segment];
  const size_t part = op_.collective == Collective::kBroadcast ? 0 : static_cast<size_t>(peer);
  return static_cast<std::byte*>(segment.full.data) + part * segment.shard.size_bytes() +
         static_cast<size_t>(piece.begin) * size_of(segment.shard.dtype);
}

std::byte* C10dExchange::sent_to(int peer, size_t room, size_t bytes) const {
  return group_.room(room).sent + static_cast<size_t>(peer < rank_ ? peer : peer - 1) * bytes;
}

const std::byte* C10dExchange::received_from(int peer, size_t room, size_t bytes) const {
  const bool is_only = op_.collective == Collective::kBroadcast;
  return group_.room(room).received + (is_only ? 0 : static_cast<size_t>(peer < rank_ ? peer : peer - 1) * bytes);
}

size_t C10dExchange::bytes_of(const Piece& piece) const {
  return static_cast<size_t>(piece.numel) * size_of(op_.segments[piece.segment].shard.dtype);
}

// Whole cache lines, so that what lies behind it is aligned.
size_t C10dExchange::bytes_of(uint64_t chunk) const {
  const Piece& last = *(chunks_.end(chunk) - 1);
  return (last.offset_bytes + bytes_of(last) + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
}

}  // namespace bucketwheel
