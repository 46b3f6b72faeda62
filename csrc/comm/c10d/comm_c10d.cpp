#include "comm/c10d/comm_c10d.h"

#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

// An operation that has been running for so long makes a peer that is dead, or has left, a failure. Shorter, and a peer
// that has finished first and gone would look like one.
constexpr std::chrono::milliseconds kWirePatience{800};
// A connection breaks when a rank dies, or interrupts what waits because it has failed: for so long the others wait to
// hear why.
constexpr std::chrono::milliseconds kLostPatience{1000};
constexpr std::chrono::milliseconds kNewsPeriod{5};
constexpr std::chrono::seconds kLastGrace{5};

}  // namespace

C10dComm::C10dComm(PeersRef peers, std::unique_ptr<Wire> wire, PoolRef pool)
    : peers_(std::move(peers)),
      wire_(std::move(wire)),
      rooms_(std::make_unique<WireRooms>(peers_->health().world())),
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
    new (std::nothrow) std::shared_ptr<Watch>(std::move(watch_));  // its thread may hold a lock, in the parent
    (void)rooms_.release();                                        // as may those of the transport
    (void)wire_.release();
    return;
  }
  try {
    close(Clock::now() + kLastGrace);
  } catch (const std::exception&) {  // a destructor tells nobody; the peers see a rank that left
  }
  watch_->stop();
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
  return order_.issue(std::move(op), std::move(options));
}

void C10dComm::post(std::span<const std::byte> payload) {
  expect_usable();
  peers_->post(payload);
}

std::vector<std::vector<std::byte>> C10dComm::collect(Deadline deadline, const std::function<void()>& poll) {
  expect_usable();
  return peers_->collect(deadline, poll);
}

std::exception_ptr C10dComm::execute(const Operation& op, const char* name) {
  if (peers_->health().has_failed()) {
    return peers_->health().error();
  }
  set_running(Running{&op, Clock::now()});
  peers_->note_issued(0, op.seq);
  std::exception_ptr error;
  try {
    WireExchange(*wire_, *rooms_, op, rank(), world()).run();
  } catch (const WireBroken& broken) {
    error = lost(broken, op, name);
  } catch (const Failure& failure) {
    error = fail(failure, name);
  } catch (const std::exception& failure) {
    error = fail(failure_of(failure, rank(), op.seq), name);
  }
  set_running({});
  return error;
}

void C10dComm::set_running(std::optional<Running> running) {
  std::lock_guard lock(running_mutex_);
  running_ = running;
}

std::exception_ptr C10dComm::lost(const WireBroken& broken, const Operation& op, const char* name) {
  const Clock::time_point until = Clock::now() + kLostPatience;
  const std::string what = text_of(op.description());
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
  return fail({FailureKind::kPeer,
               "the connection to rank " + std::to_string(broken.peer) + " broke in " + what + ": " + broken.text,
               broken.peer, op.seq},
              name);
}

std::exception_ptr C10dComm::fail(const Failure& failure, const char* op) {
  const std::exception_ptr error = peers_->fail(failure, {failure.seq, op, ""});
  if (!flight_.has_tried()) {
    flight_.write(peers_->health().message());
  }
  return error;
}

void C10dComm::settle() {
  set_running(Running{nullptr, Clock::now()});
  try {
    rooms_->settle();            // the peers have what this rank has sent
  } catch (const WireBroken&) {  // or they have failed, and who is told of that
  }
  rooms_->forget();
  set_running({});
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
  Clock::duration waited{0};
  bool is_settling = false;
  {
    std::lock_guard lock(running_mutex_);
    if (running_) {
      waited = Clock::now() - running_->since;
      is_settling = running_->op == nullptr;
    }
    if (is_settling) {
      what = "close(), until all ranks have received the last operation";
    } else if (running_) {
      what = text_of(running_->op->description());
      name = name_of(running_->op->collective);
      seq = running_->op->seq;
    }
  }
  const bool needs_peers = !is_settling && waited > kWirePatience;  // a peer that has left has received all
  if (auto failure = peers_->trouble(0, [&](int) { return needs_peers; }, what.c_str())) {
    failure->seq = seq;
    is_late_ = is_settling && failure->kind == FailureKind::kTimeout;
    fail(*failure, name);
  } else if (waited > peers_->timeout()) {
    if (const auto last = peers_->last_seqs(0)) {  // else they are being asked
      Failure late{FailureKind::kTimeout, "timeout in " + what + peers_->late_text(*last, seq, "begun"), -1, seq};
      late.last_seqs = *last;
      is_late_ = is_settling;
      fail(late, name);
    }
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
  order_.stop(deadline, give_up, [this] { settle(); });
  is_closed_ = true;
  peers_->part(deadline);
  order_.stream()->close();
  // No handle tells it: this rank's operations are over. There is none where the wait has ended in the last moment.
  if (const std::exception_ptr late = is_late_ ? peers_->health().error() : nullptr) {
    std::rethrow_exception(late);
  }
}

}  // namespace bucketwheel
