// Peers: what the ranks of a communicator know of each other beside the data that it moves: that they live, what their
// hosts agree on, and why one of them failed. Ranks that share a host have the control segment for it (HostComm),
// others the torch Store and a process group of the CPU (StorePeers).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/failure.h"
#include "comm/public_call.h"

namespace bucketwheel {

class Peers {
 public:
  virtual ~Peers() = default;
  virtual Health& health() = 0;
  // Of an operation, and of a round of agreement.
  virtual std::chrono::nanoseconds timeout() const = 0;
  Clock::time_point timeout_from_now() const { return Clock::now() + timeout(); }

  // As Comm::post() and Comm::collect().
  virtual void post(std::span<const std::byte> payload) = 0;
  virtual std::vector<std::vector<std::byte>> collect(Deadline deadline, const std::function<void()>& poll) = 0;

  // Why an operation cannot be completed: a rank has failed at `seq` or before (0: whenever), or one for which
  // needs(rank) holds is dead or has left. `what` needs it, for the message.
  virtual std::optional<Failure> trouble(uint64_t seq, const std::function<bool(int)>& needs, const char* what) = 0;
  // Makes `failure` the communicator's error, unless it has one, and tells the peers. Returns the error that stands.
  virtual std::exception_ptr fail(const Failure& failure, const FailedAt& at) = 0;

  // Tells the peers how far this rank has issued on one of the data paths that share it (at most kPaths).
  static constexpr int kPaths = 2;
  virtual void note_issued(int path, uint64_t seq) = 0;
  // Whether this rank sees what the others have issued, without asking; and if it does, whether all are at `seq`.
  virtual bool sees_issued() const = 0;
  virtual bool have_all_issued(int path, uint64_t seq) const = 0;
  // How far all ranks have issued on it. Nothing: they have been asked, and will have answered, or be taken for ones
  // that do not answer, within kPatience.answer. Never blocks.
  virtual std::optional<LastSeqs> last_seqs(int path) = 0;
  // For messages, behind what all ranks were to have `done` ("issued") by then: ". Not arrived: rank 2 (pid 1234, has not
  // called all_gather, last issued 117). Unknown (no answer): rank 3", or that all have. `op`: what they were to call, where
  // this rank is in no public call.
  std::string late_text(const LastSeqs& last, uint64_t seq, const char* done, const char* op);

  // [Note: who is missing], comm/public_call.h. Of this rank.
  virtual PublicCall& call() = 0;
  // Tells the wait for `what`, if this is the lowest rank that waits; the rest as in late_text().
  void tell(std::chrono::nanoseconds waited, const std::string& what, const LastSeqs& last, uint64_t seq,
            const char* done, const char* op);
  // Of the operation `seq` of a data path, which waits for peers: tells it when that is due. The failure when its time is
  // over. Called by the watchdog.
  std::optional<Failure> late(std::chrono::nanoseconds waited, const std::string& what, int path, uint64_t seq,
                              const char* done, const char* op);

  // Data paths that share these peers: the last one that goes says goodbye to them, and later calls throw ClosedError.
  void join() { ++users_; }
  void part(Deadline deadline) {
    if (--users_ == 0) {
      leave(deadline);
    }
  }

 protected:
  // Idempotent.
  virtual void leave(Deadline deadline) = 0;
  // "pid 1234", or what else is known of a rank; may be empty.
  virtual std::string describe(int rank) const = 0;
  // PublicCall::text() of a rank, where that is known.
  virtual std::string call_of(int rank) const = 0;
  // The next last_seqs() is to ask again.
  virtual void forget_answers() {}

 private:
  std::atomic<int> users_{0};
};
using PeersRef = std::shared_ptr<Peers>;

}  // namespace bucketwheel
