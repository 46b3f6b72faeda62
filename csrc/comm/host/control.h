// Control segment: the memory in which the ranks of a communicator publish their progress.
//
// [Note: progress words] Each rank owns one RankRecord and is the only one to write it, except for the doorbell. Words
// only grow, so a reader needs no lock: `entered` = n says that the descriptor of operation n can be read, `finished`
// = n that its rank no longer reads anybody's input. An operation is complete when all ranks have finished it, and a
// rank enters the next one only then; so descriptors, staging buffers and inputs are free for reuse at that point.
// All words are sequentially consistent: a rank stores its word and then looks whether anybody sleeps, a waiter says
// that it sleeps and then looks at the word; with anything weaker both could miss each other.
//
// Zero-filled memory is a valid control segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/align.h"
#include "comm/failure.h"
#include "comm/operation.h"

namespace bucketwheel {

// Where one input lies, for peers that map the slab.
struct InputPart {
  uint32_t slab;
  uint64_t offset_bytes;
};
inline constexpr uint32_t kNoSlab = UINT32_MAX;  // an empty input

struct RankRecord {
  alignas(kCacheLineBytes) std::atomic<uint64_t> entered;
  alignas(kCacheLineBytes) std::atomic<uint64_t> finished;
  // Chunks of staged inputs, as chunk_word(seq, count).
  alignas(kCacheLineBytes) std::atomic<uint64_t> staged;
  alignas(kCacheLineBytes) std::atomic<uint64_t> taken;
  // Rounds of post(); payload_bytes by parity of the round.
  alignas(kCacheLineBytes) std::atomic<uint64_t> posted;
  uint64_t payload_bytes[2];

  // How far each data path that is not this segment's has issued.
  static constexpr int kPaths = 2;
  alignas(kCacheLineBytes) std::atomic<uint64_t> issued[kPaths];

  // The doorbell: peers (and threads of the rank) ring it after they changed something the rank may sleep on.
  alignas(kCacheLineBytes) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;

  // Why this rank failed its communicator: written once, the kind last.
  alignas(kCacheLineBytes) std::atomic<FailureKind> failure;
  std::atomic<uint64_t> given_up;  // the operation that failed here, once this rank reads nobody's input any more
  std::atomic<uint32_t> has_left;  // closed in an orderly way
  int32_t failure_rank;            // as in Failure
  int32_t failure_nccl_code;
  uint64_t failure_seq;  // no operation before this one is affected
  char failure_text[1024];
  char failure_last_error[512];

  // The descriptor of operation `entered`.
  alignas(kCacheLineBytes) uint64_t signature;
  uint64_t inputs_address;  // local: the array of input pointers
  uint32_t is_direct;       // peers read the inputs where they are; else from the staging buffers
  Description description;
  // shm: where the inputs are. Longer lists are staged.
  static constexpr size_t kMaxParts = 4096;
  alignas(kCacheLineBytes) InputPart parts[kMaxParts];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<FailureKind>::is_always_lock_free);

// Chunk numbers start again with every operation, the words must not: 2^40 operations of 2^24 chunks.
constexpr uint64_t chunk_word(uint64_t seq, uint64_t count) { return seq << 24 | count; }

// A view of the control segment of `world` ranks. Does not own the memory.
class Control {
 public:
  // Of 256 KiB, more beyond 8 ranks (docs/performance.md has the measurements): with two, a rank that is kept from running soon keeps the others waiting.
  static constexpr int kStagingSlots = 4;
  static constexpr size_t kPayloadBytes = size_t{1} << 20;

  Control(std::byte* base, int world) : base_(base), world_(world) {}
  static size_t size_bytes(int world);
  // Of one staging buffer.
  static size_t staging_bytes(int world);

  int world() const { return world_; }
  RankRecord& record(int rank) const;
  std::byte* staging(int rank, int slot) const;
  std::byte* payload(int rank, int slot) const;

 private:
  std::byte* base_;
  int world_;
};

// Wakes whoever sleeps on the record's doorbell.
void ring(RankRecord& record);

}  // namespace bucketwheel
