// Team: one rank's view of the progress of all ranks, and the waiting for it. Transport: how it reaches its peers' memory.
//
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
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/align.h"
#include "comm/failure.h"
#include "comm/operation.h"
#include "comm/public_call.h"
#include "pool/pool.h"

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
  PublicCall call;

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
  // Of 256 KiB, more beyond 8 ranks (benchmarks/README.md has the measurements): with two, a rank that is kept from
  // running soon keeps the others waiting.
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

// The inputs of one peer as this rank reads them, by tensor pair, and what keeps them mapped.
struct PeerInputs {
  std::vector<const std::byte*> begins;
  std::vector<std::shared_ptr<const void>> mappings;
};

// How a communicator reaches its peers' memory, and knows that they live. One per backend.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* backend() const = 0;
  virtual const PoolRef& pool() const = 0;
  // Writes into this rank's descriptor where peers find the inputs; false when they must be staged.
  virtual bool describe_inputs(const Operation& op, RankRecord& own) = 0;
  // Finds the inputs that a peer described; false when a slab has not arrived yet (its arrival rings our doorbell).
  virtual bool find_inputs(int peer, const RankRecord& theirs, const Operation& op, PeerInputs& out) = 0;
  // Whether the memory of our inputs goes away for the peers too when we free it.
  virtual bool shares_inputs() const = 0;
  // Ended without leave(). The doorbell rings when this turns true.
  virtual bool is_dead(int peer) const = 0;
  // For messages: "pid 1234".
  virtual std::string describe_peer(int peer) const = 0;
  // Says goodbye; no memory of ours is announced to peers any more.
  virtual void leave() noexcept = 0;
};

class Team {
 public:
  // `health` of the communicator must outlive this.
  Team(int rank, Control control, std::unique_ptr<Transport> transport, Health& health);

  int rank() const { return rank_; }
  int world() const { return control_.world(); }
  const Control& control() const { return control_; }
  RankRecord& own() const { return control_.record(rank_); }
  RankRecord& record(int rank) const { return control_.record(rank); }
  Transport& transport() const { return *transport_; }

  // Wakes the ranks that sleep; to be called after a word of our own record has changed.
  void ring_peers() const;

  struct Wait {
    uint64_t seq;  // of the operation; failures at later ones do not concern this wait. 0: not an operation, all do
    Deadline deadline;                            // Failure kTimeout behind it
    const std::function<void()>* poll = nullptr;  // called, unless empty, every 100 ms of sleep; may throw
    const char* what = nullptr;                   // for messages; null: the operation of our record, or the round
    bool is_told = false;                         // it has lasted so long that stderr was told
  };
  // Returns when is_ready(). Throws Failure when it cannot become ready: a rank for which needs(rank) holds died or
  // left, a rank failed, we were stopped, or the deadline passed. Safe on several threads.
  template <class IsReady, class Needs>
  void await(const Wait& wait, IsReady&& is_ready, Needs&& needs) {
    if (!is_ready()) {
      await_slow(wait, is_ready, needs);
    }
  }

  // Makes every wait of this rank throw, on whatever thread. The first call counts.
  void stop(Failure failure);
  // Tells the other ranks that this one failed. The first call counts.
  void publish(const Failure& failure);
  // [Note: failing with readers] A rank that fails frees its inputs while peers may be reading them. So it first says
  // that it failed, then that it reads nothing any more, and then waits for the peers that have entered the operation
  // to say the same; a peer first says that it has entered and then looks whether the rank failed. One of the two
  // sees the other. (An abort says that a rank failed while its operation may still be reading: the second word is
  // needed.)
  void await_readers(uint64_t seq);
  bool has_failed_peer() const;
  // Throws when `rank` has failed in `wait` or before.
  void expect_not_failed(const Wait& wait, int rank) const;
  using IsReady = std::function<bool()>;
  using Needs = std::function<bool(int)>;
  // One look of await().
  void expect_no_trouble(const Wait& wait, const IsReady& is_ready, const Needs& needs) const;

 private:
  void await_slow(const Wait& wait, const IsReady& is_ready, const Needs& needs);
  bool spin(const IsReady& is_ready);
  std::string text_of_wait(const Wait& wait) const;
  std::string text_of_missing(const Wait& wait, const Needs& needs) const;
  void tell(const Wait& wait, std::chrono::nanoseconds waited, const Needs& needs) const;
  [[noreturn]] void throw_timeout(const Wait& wait, const Needs& needs) const;

  const int rank_;
  const Control control_;
  const std::unique_ptr<Transport> transport_;
  Health& health_;
  const bool has_cores_;          // there is a core for every rank
  std::atomic<int64_t> spin_ns_;  // [Note: adaptive spin], team.cpp
  std::atomic<bool> is_stopped_{false};
  std::mutex mutex_;                     // of the two below
  std::unique_ptr<const Failure> stop_;  // set once, before is_stopped_
  bool is_published_ = false;
};

}  // namespace bucketwheel
