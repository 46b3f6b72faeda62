#include "comm/c10d/comm.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/c10d/exchange.h"
#include "comm/peers/patience.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::milliseconds kNewsPeriod{5};

}  // namespace

C10dComm::C10dComm(PeersRef peers, std::unique_ptr<ProcessGroup> group, PoolRef pool)
    : peers_(std::move(peers)),
      group_(std::move(group)),
      pool_(std::move(pool)),
      flight_(
          {peers_->health().name(), peers_->health().rank(), peers_->health().world(), "c10d", peers_->health().id()}),
      order_(
          peers_->health(), flight_, [this](const Operation& op, const char* name) { return execute(op, name); },
          IssueOrder::Runs::kByOneThread) {
  peers_->join();
  watch_ = watch([this] { look(); });
}

C10dComm::~C10dComm() {
  if (peers_->health().is_forked()) {
    (void)group_.release();  // its threads may hold locks, in the parent
    return;
  }
  try {
    close(Clock::now() + kPatience.destructor);
  } catch (const std::exception&) {  // a destructor tells nobody; the peers see a rank that left
  }
}

void C10dComm::expect_usable() const {
  const Health& health = peers_->health();
  if (is_closing_ && !health.is_forked() && !health.has_failed()) {
    throw ClosedError(health.prefix(health.last_seq()) + "the communicator is closed", {.seq = health.last_seq()});
  }
  health.expect_usable();
}

HandleRef C10dComm::issue(std::shared_ptr<Operation> op, IssueOptions options) {
  expect_usable();
  op->owner = std::make_shared<std::vector<Handle::Keepalive>>(options.keepalive);
  return order_.issue(std::move(op), std::move(options));
}

std::exception_ptr C10dComm::execute(const Operation& op, const char* name) {
  if (peers_->health().has_failed()) {
    return peers_->health().error();
  }
  {
    std::lock_guard lock(running_mutex_);
    running_ = Running{&op, Clock::now(), {}};
  }
  peers_->note_issued(0, op.seq);
  std::exception_ptr error;
  try {
    C10dExchange(*group_, op, rank(), world(), [this](size_t room) { await(room); }).run();
  } catch (const AllToAllFailed& failed) {
    error = lost(failed, op, name);
  } catch (const Failure& failure) {
    error = fail(failure, name);
  } catch (const std::exception& failure) {
    error = fail(failure_of(failure, rank(), op.seq), name);
  }
  {
    std::lock_guard lock(running_mutex_);
    running_.reset();
  }
  if (error) {
    group_->abandon();  // the peers have been told why
  }
  return error;
}

void C10dComm::await(size_t room) {
  set_waits_since(Clock::now());
  while (!group_->wait(room)) {
    if (peers_->health().has_failed()) {
      throw AllToAllFailed{"given up"};
    }
  }
  set_waits_since({});
}

void C10dComm::set_waits_since(std::optional<Clock::time_point> since) {
  std::lock_guard lock(running_mutex_);
  running_->waits_since = since;
}

std::exception_ptr C10dComm::lost(const AllToAllFailed& failed, const Operation& op, const char* name) {
  const Clock::time_point until = Clock::now() + kPatience.goodbye;
  const std::string what = peers_->call().in_call(text_of(op.description()));
  do {
    if (peers_->health().has_failed()) {
      return peers_->health().error();
    }
    if (auto failure = peers_->trouble(0, [](int) { return true; }, what.c_str())) {
      failure->seq = op.seq;
      return fail(*failure, name);
    }
    std::this_thread::sleep_for(kNewsPeriod);
  } while (Clock::now() < until);
  return fail({FailureKind::kError, "the process group failed in " + what + ": " + failed.text, rank(), op.seq}, name);
}

std::exception_ptr C10dComm::fail(const Failure& failure, const char* op) {
  const std::exception_ptr error = peers_->fail(failure, {failure.seq, op, ""});
  if (!flight_.has_tried()) {
    flight_.write(peers_->health().message());
  }
  return error;
}

// Called by the watchdog.
void C10dComm::look() noexcept {
  if (peers_->health().has_failed() || peers_->health().is_closing()) {
    return;
  }
  try {
    expect_progress();
  } catch (const std::exception& error) {
    fail(failure_of(error, rank(), peers_->health().last_seq()));
  }
}

void C10dComm::expect_progress() {
  std::string what;
  const char* name = "";
  uint64_t seq = peers_->health().last_seq();
  Clock::duration waited{};
  bool needs_peers = false;
  {
    std::lock_guard lock(running_mutex_);
    if (running_) {
      const Clock::time_point now = Clock::now();
      what = text_of(running_->op->description());
      name = name_of(running_->op->collective);
      seq = running_->op->seq;
      waited = now - running_->since;
      needs_peers = running_->waits_since && now - *running_->waits_since > kPatience.peer;
    }
  }
  const std::string needing = peers_->call().in_call(what);
  if (auto failure = peers_->trouble(0, [&](int) { return needs_peers; }, needing.c_str())) {
    failure->seq = seq;
    fail(*failure, name);
  } else if (const auto late = peers_->late(waited, what, 0, seq, "begun", name)) {
    fail(*late, name);
  }
}

void C10dComm::abort(const std::string& reason) noexcept {
  if (!peers_->health().is_forked() && !is_closing_) {
    fail({FailureKind::kAborted, "aborted by rank " + std::to_string(rank()) + ": " + reason, rank(),
          peers_->health().last_seq()});
  }
}

void C10dComm::close(Deadline deadline) {
  if (peers_->health().is_forked()) {
    return;  // the parent's communicator is not the child's to close
  }
  std::lock_guard lock(close_mutex_);
  if (is_closed_) {
    return;
  }
  is_closing_ = true;
  const auto give_up = [this] {
    fail({FailureKind::kClosed, "closed while operations were in flight", -1, peers_->health().last_seq()});
  };
  order_.stop(deadline, give_up);
  is_closed_ = true;
  peers_->part(deadline);
  order_.stream()->close();
}

}  // namespace bucketwheel
