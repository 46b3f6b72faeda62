#include "comm/host/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/platform.h"
#include "comm/outputs.h"
#include "kernels/reduce.h"

namespace bucketwheel {
namespace {

size_t window_bytes_of(Collective collective, int world) {
  const size_t slot_bytes = Control::staging_bytes(world);
  if (collective != Collective::kReduceScatter || world <= 2) {
    return slot_bytes;
  }
  return slot_bytes / static_cast<size_t>(world - 1) / kCacheLineBytes * kCacheLineBytes;
}

}  // namespace

Exchange::Exchange(Team& team, const Operation& op, Deadline deadline)
    : team_(team),
      op_(op),
      deadline_(deadline),
      window_bytes_(window_bytes_of(op.collective, team.world())),
      peers_(static_cast<size_t>(team.world())),
      sources_(static_cast<size_t>(team.world())) {}

void Exchange::run() {
  const IeeeFloats ieee;
  enter();
  if (op_.collective == Collective::kAllGather) {
    copy_own_part(op_, team_.rank());
  }
  meet_peers();
  const bool has_staged_peer = std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return !p.is_direct; });
  if (is_staged_ || has_staged_peer) {
    pass_chunks();
  } else if (op_.reduces()) {
    reduce_all();
  }
  finish();
  if (op_.sink && !op_.reduces()) {
    feed_gathered(op_);  // peers need nothing of ours any more
  }
}

void Exchange::enter() {
  RankRecord& own = team_.own();
  Peer& self = peers_[static_cast<size_t>(team_.rank())];
  self = {true, true, {op_.inputs, {}}};  // we read our own inputs where they are
  is_staged_ = team_.world() > 1 && op_.has_input(team_.rank()) && !team_.transport().describe_inputs(op_, own);
  own.is_direct = !is_staged_;
  own.signature = op_.signature;
  own.description = op_.description();
  if (is_staged_) {
    chunks_ = std::make_unique<const Chunks>(op_, window_bytes_);
    if (chunks_->count() != 0) {
      stage(0);  // peers can do nothing before the first chunk is there: one doorbell for both
    }
  }
  own.entered = op_.seq;
  team_.ring_peers();
}

void Exchange::meet_peers() {
  for (int met = 1; met < team_.world(); ++met) {
    int next = -1;
    const auto has_entered = [&](int r) {
      return !peers_[static_cast<size_t>(r)].has_arrived && team_.record(r).entered >= op_.seq;
    };
    team_.await(
        wait(),
        [&] {
          // Starting behind our own rank, so that ranks do not all read the same peer first.
          for (int i = 1; i < team_.world() && next < 0; ++i) {
            const int r = (team_.rank() + i) % team_.world();
            next = has_entered(r) ? r : -1;
          }
          return next >= 0;
        },
        [&](int r) { return !peers_[static_cast<size_t>(r)].has_arrived; });
    meet(next);
    if (!op_.reduces() && op_.has_input(next) && peers_[static_cast<size_t>(next)].is_direct) {
      gather_direct(next);
    }
  }
}

void Exchange::meet(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const RankRecord& theirs = team_.record(rank);
  peer.has_arrived = true;
  if (theirs.entered != op_.seq || theirs.signature != op_.signature) {
    throw_mismatch();
  }
  team_.expect_not_failed(wait(), rank);  // [Note: failing with readers]
  peer.is_direct = theirs.is_direct != 0;
  if (peer.is_direct && op_.has_input(rank)) {
    team_.await(
        wait(), [&] { return team_.transport().find_inputs(rank, theirs, op_, peer.inputs); },
        [&](int r) { return r == rank; });
  }
}

void Exchange::throw_mismatch() {
  // The others are probably about to arrive: a message that names all of them is worth a moment.
  constexpr std::chrono::milliseconds kPatience{200};
  const auto has_entered = [&](int r) { return team_.record(r).entered >= op_.seq; };
  try {
    team_.await(
        {op_.seq, Clock::now() + kPatience},
        [&] {
          for (int r = 0; r < team_.world(); ++r) {
            if (!has_entered(r)) {
              return false;
            }
          }
          return true;
        },
        [&](int r) { return !has_entered(r); });
  } catch (const Failure&) {  // too late, dead, or failed by this very mismatch: listed below as not arrived
  }
  std::vector<std::string> calls;
  for (int r = 0; r < team_.world(); ++r) {
    calls.push_back(has_entered(r) ? text_of(team_.record(r).description) : "(has not arrived)");
  }
  throw Failure{FailureKind::kMismatch, mismatch_text(calls), -1, op_.seq};
}

void Exchange::pass_chunks() {
  if (!chunks_) {
    chunks_ = std::make_unique<const Chunks>(op_, window_bytes_);
  }
  RankRecord& own = team_.own();
  const uint64_t count = chunks_->count();
  const auto has_reached = [&](std::atomic<uint64_t> RankRecord::* word, int r, uint64_t chunks) {
    return r == team_.rank() || (team_.record(r).*word) >= chunk_word(op_.seq, chunks);
  };
  for (uint64_t chunk = 0; chunk < count; ++chunk) {
    // One ahead: peers copy this chunk while we fill the next buffer, once they have all taken what was in it.
    const uint64_t next = chunk + 1;
    if (is_staged_ && next < count) {
      if (next >= Control::kStagingSlots) {
        const uint64_t taken = next + 1 - Control::kStagingSlots;
        for (int r = 0; r < team_.world(); ++r) {
          team_.await(wait(), [&] { return has_reached(&RankRecord::taken, r, taken); }, [&](int q) { return q == r; });
        }
      }
      stage(next);
      team_.ring_peers();
    }
    for (int i = 1; i < team_.world(); ++i) {
      const int r = (team_.rank() + i) % team_.world();
      if (peers_[static_cast<size_t>(r)].is_direct) {
        continue;
      }
      team_.await(wait(), [&] { return has_reached(&RankRecord::staged, r, next); }, [&](int q) { return q == r; });
      if (!op_.reduces()) {
        gather_staged(r, chunk);
      }
    }
    if (op_.reduces()) {
      reduce_chunk(chunk);
    }
    own.taken = chunk_word(op_.seq, next);
    if (next < count) {
      team_.ring_peers();
    }
  }
}

void Exchange::finish() {
  team_.own().finished = op_.seq;
  team_.ring_peers();
  for (int r = 0; r < team_.world(); ++r) {
    const auto is_missing = [&](int q) { return q != team_.rank() && team_.record(q).finished < op_.seq; };
    team_.await(wait(), [&] { return !is_missing(r); }, is_missing);
  }
}

void Exchange::stage(uint64_t chunk) {
  const int own_rank = team_.rank();
  std::byte* slot = team_.control().staging(own_rank, static_cast<int>(chunk % Control::kStagingSlots));
  for (const Piece* piece = chunks_->begin(chunk); piece != chunks_->end(chunk); ++piece) {
    const std::byte* from = op_.inputs[piece->pair] + piece->begin_bytes;
    if (!op_.reduces()) {
      std::memcpy(slot + piece->offset_bytes, from, piece->size_bytes);
      continue;
    }
    const size_t shard_bytes = op_.pairs[piece->pair].shard.size_bytes();
    for (int r = 0; r < team_.world(); ++r) {
      if (r != own_rank) {
        std::memcpy(slot + window_of(own_rank, r) + piece->offset_bytes, from + static_cast<size_t>(r) * shard_bytes,
                    piece->size_bytes);
      }
    }
  }
  team_.own().staged = chunk_word(op_.seq, chunk + 1);
}

void Exchange::gather_direct(int rank) {
  const PeerInputs& inputs = peers_[static_cast<size_t>(rank)].inputs;
  for (size_t i = 0; i < op_.pairs.size(); ++i) {
    const size_t bytes = op_.pairs[i].shard.size_bytes();
    if (bytes != 0) {
      put_gathered(op_, i, op_.place_of(rank, i), inputs.begins[i], bytes);
    }
  }
}

void Exchange::gather_staged(int rank, uint64_t chunk) {
  const std::byte* slot = team_.control().staging(rank, static_cast<int>(chunk % Control::kStagingSlots));
  for (const Piece* piece = chunks_->begin(chunk); piece != chunks_->end(chunk); ++piece) {
    put_gathered(op_, piece->pair, op_.place_of(rank, piece->pair) + piece->begin_bytes, slot + piece->offset_bytes,
                 piece->size_bytes);
  }
}

const std::byte* Exchange::part_of(int rank, size_t pair) const {
  return peers_[static_cast<size_t>(rank)].inputs.begins[pair] +
         static_cast<size_t>(team_.rank()) * op_.pairs[pair].shard.size_bytes();
}

size_t Exchange::window_of(int owner, int reader) const {
  return static_cast<size_t>(reader < owner ? reader : reader - 1) * window_bytes_;
}

void Exchange::reduce_all() {
  for (size_t i = 0; i < op_.pairs.size(); ++i) {
    if (op_.pairs[i].shard.numel != 0) {
      for (int r = 0; r < team_.world(); ++r) {
        sources_[static_cast<size_t>(r)] = part_of(r, i);
      }
      store_sums(op_, i, 0, op_.pairs[i].shard.numel, sources_);
    }
  }
}

void Exchange::reduce_chunk(uint64_t chunk) {
  for (const Piece* piece = chunks_->begin(chunk); piece != chunks_->end(chunk); ++piece) {
    for (int r = 0; r < team_.world(); ++r) {
      const std::byte* slot = team_.control().staging(r, static_cast<int>(chunk % Control::kStagingSlots));
      sources_[static_cast<size_t>(r)] = peers_[static_cast<size_t>(r)].is_direct
                                             ? part_of(r, piece->pair) + piece->begin_bytes
                                             : slot + window_of(r, team_.rank()) + piece->offset_bytes;
    }
    store_sums(op_, piece->pair, piece->begin, piece->numel, sources_);
  }
}

}  // namespace bucketwheel
