// IssueOrder: the operations of one communicator of the CPU as tasks of host streams, in the order of their issue
// whatever streams they are in. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/comm.h"
#include "comm/failure.h"
#include "comm/flight.h"
#include "comm/handle.h"
#include "comm/operation.h"

namespace bucketwheel {

class IssueOrder {
 public:
  // Runs an operation in its stream, unless the communicator has failed; what it failed with. Must not throw.
  using Execute = std::function<std::exception_ptr(const Operation&, const char* name)>;
  // kByOneThread: an operation in another stream than the communicator's own runs in that one all the same, ordered by
  // events.
  enum class Runs : uint8_t { kInTheirStream, kByOneThread };
  // `health`, `flight` and what `execute` needs outlive every operation.
  IssueOrder(Health& health, FlightRing& flight, Execute execute, Runs runs);

  const StreamRef& stream() const { return stream_; }  // the communicator's own
  // Sets the seq of `op`. Throws what Health::expect_usable() throws, ClosedError behind stop(); nothing is enqueued then.
  HandleRef issue(std::shared_ptr<Operation> op, IssueOptions options);
  // Nothing is issued any more. Waits for what is in flight; at the deadline `give_up` is called, which has to see to its
  // end, and waited on.
  void stop(Deadline deadline, const std::function<void()>& give_up);

 private:
  void run(const Operation& op, Handle::State& state);

  Health& health_;
  FlightRing& flight_;
  const Execute execute_;
  const Runs runs_;
  const std::shared_ptr<const std::string> who_;  // of messages
  const StreamRef stream_;

  std::mutex mutex_;  // seq order is issue order; also guards the rest
  bool is_stopped_ = false;
  uint64_t seq_ = 0;
  EventRef last_done_;
  bool last_was_own_stream_ = true;
};

}  // namespace bucketwheel
