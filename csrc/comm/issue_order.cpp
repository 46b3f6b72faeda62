#include "comm/issue_order.h"

#include <utility>

namespace bucketwheel {

IssueOrder::IssueOrder(Health& health, FlightRing& flight, Execute execute, Runs runs)
    : health_(health),
      flight_(flight),
      execute_(std::move(execute)),
      runs_(runs),
      who_(std::make_shared<const std::string>(health.who())),
      stream_(runs == Runs::kByOneThread ? new_worker_stream("bw-" + health.name())
                                         : cpu_device().new_stream("bw-" + health.name())) {}

HandleRef IssueOrder::issue(std::shared_ptr<Operation> op, IssueOptions options) {
  auto state = std::make_shared<Handle::State>();
  state->op = name_of(op->collective);
  state->who = who_;
  state->size_bytes = op->size_bytes;
  state->keepalive = std::move(options.keepalive);
  std::lock_guard lock(mutex_);
  health_.expect_usable();
  if (is_stopped_) {
    throw ClosedError(health_.prefix(seq_) + "the communicator is closed", {.seq = seq_});
  }
  Stream& asked = options.stream != nullptr ? *options.stream : *stream_;
  Stream& stream = runs_ == Runs::kByOneThread ? *stream_ : asked;
  const bool is_own_stream = &stream == stream_.get();
  if (&stream != &asked) {
    stream.wait(asked.record());
  }
  for (const EventRef& event : options.after) {
    stream.wait(event);
  }
  // One stream runs its tasks in order; across streams the order of operations needs an edge.
  if (last_done_ && !(is_own_stream && last_was_own_stream_)) {
    stream.wait(last_done_);
  }
  op->seq = state->seq = seq_ + 1;
  flight_.issued(*op, Clock::now());
  stream.run([this, op = std::move(op), state] { run(*op, *state); });
  seq_ = state->seq;
  health_.set_last_seq(state->seq);
  state->done = stream.record(options.timing);
  last_done_ = state->done;
  last_was_own_stream_ = is_own_stream;
  if (&stream != &asked) {
    asked.wait(state->done);
  }
  return std::make_shared<Handle>(std::move(state));
}

void IssueOrder::run(const Operation& op, Handle::State& state) {
  flight_.started(op.seq);
  std::exception_ptr error = execute_(op, state.op);
  flight_.finished(op.seq, !error);
  std::exchange(state.keepalive, {}).clear();
  if (error) {
    state.outcome.fail(std::move(error));
  } else {
    state.outcome.complete();
  }
}

void IssueOrder::stop(Deadline deadline, const std::function<void()>& give_up) {
  EventRef done;
  {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    done = last_done_;
  }
  if (done && !done->synchronize(deadline)) {
    give_up();
    done->synchronize();
  }
}

}  // namespace bucketwheel
