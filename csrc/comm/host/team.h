// Team: one rank's view of the progress of all ranks, and the waiting for it. Transport: how it reaches its peers' memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/failure.h"
#include "comm/host/control.h"
#include "comm/operation.h"
#include "pool/pool.h"

namespace bucketwheel {

// The inputs of one peer as this rank reads them, by segment, and what keeps them mapped.
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
  Team(int rank, Control control, std::unique_ptr<Transport> transport);

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
  [[noreturn]] void throw_timeout(const Wait& wait, const Needs& needs) const;

  const int rank_;
  const Control control_;
  const std::unique_ptr<Transport> transport_;
  const bool has_cores_;          // there is a core for every rank
  std::atomic<int64_t> spin_ns_;  // [Note: adaptive spin], team.cpp
  std::atomic<bool> is_stopped_{false};
  std::mutex mutex_;                     // of the two below
  std::unique_ptr<const Failure> stop_;  // set once, before is_stopped_
  bool is_published_ = false;
};

}  // namespace bucketwheel
