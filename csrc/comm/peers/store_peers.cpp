#include "comm/peers/store_peers.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "comm/comm.h"

namespace bucketwheel {
namespace {

// A process that ends right after leave() would look dead to a peer that has not had its goodbye.
constexpr std::chrono::seconds kLeavePatience{2};
// Whoever asks later wants to know it anew.
constexpr std::chrono::seconds kAnswersLast{2};
// Why nobody can be asked is mostly that a rank has failed: who waits for answers is to hear of that first.
constexpr std::chrono::milliseconds kNewsPatience{500};

}  // namespace

StorePeers::StorePeers(std::string name, int rank, int world, std::chrono::nanoseconds timeout, Agreement agreement,
                       std::string id)
    : health_(std::move(name), rank, world, std::move(id)),
      timeout_(timeout),
      agreement_(std::move(agreement)),
      is_gone_(static_cast<size_t>(world)) {}

void StorePeers::post(std::span<const std::byte> payload) {
  health_.expect_usable();
  BW_EXPECTS(payload.size() <= Comm::kMaxPayloadBytes, "post: the payload has " + std::to_string(payload.size()) +
                                                           " bytes, at most " + std::to_string(Comm::kMaxPayloadBytes) +
                                                           " fit");
  agreement().post(payload);
  ++progress_[kPaths];
}

StorePeers::Payloads StorePeers::collect(Deadline deadline, const std::function<void()>& poll) {
  health_.expect_usable();
  return agreement().collect(deadline, poll);
}

std::optional<Failure> StorePeers::trouble(uint64_t seq, const std::function<bool(int)>& needs, const char* what) {
  std::lock_guard lock(mutex_);
  if (delivered_ && (seq == 0 || delivered_->seq <= seq)) {
    return delivered_;
  }
  for (int r = 0; r < health_.world(); ++r) {
    if (is_gone_[static_cast<size_t>(r)] && r != health_.rank() && needs(r)) {
      return Failure{FailureKind::kPeer,
                     "rank " + std::to_string(r) + " has closed the communicator; needed for " + what, r, seq};
    }
  }
  return {};
}

std::exception_ptr StorePeers::fail(const Failure& failure, const FailedAt& at) {
  const Health::Verdict verdict = health_.fail(failure, at);
  std::lock_guard lock(mutex_);
  if (verdict.is_first && !delivered_) {
    report_ = failure;
    if (failure.kind == FailureKind::kClosed) {
      report_ = {FailureKind::kPeer, "rank " + std::to_string(health_.rank()) + " " + failure.text, health_.rank(),
                 failure.seq};
    }
  }
  changed_.notify_all();
  return verdict.error;
}

std::optional<Failure> StorePeers::take_report(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto is_ready = [this] { return report_.has_value() || is_asking_ || health_.is_closing(); };
  if (deadline) {
    changed_.wait_until(lock, *deadline, is_ready);
  } else {
    changed_.wait(lock, is_ready);
  }
  return std::exchange(report_, std::nullopt);
}

StorePeers::Progress StorePeers::progress() const {
  Progress copy{};
  std::ranges::copy(progress_, copy.begin());
  return copy;
}

std::optional<LastSeqs> StorePeers::last_seqs(int path) {
  const auto now = Clock::now();
  std::lock_guard lock(mutex_);
  if (answers_ && now - answered_at_ > kAnswersLast) {
    answers_.reset();
    asked_at_.reset();
  }
  const bool is_over = asked_at_ && now - *asked_at_ >= kAnswerPatience;
  const bool is_alone = asks_nobody_since_ && now - *asks_nobody_since_ >= kNewsPatience;
  if (!answers_ && (is_over || is_alone)) {
    take_answers({}, now);
  }
  if (!answers_) {
    if (!asked_at_) {
      asked_at_ = now;
      is_asking_ = !asks_nobody_since_;
      changed_.notify_all();
    }
    return {};
  }
  LastSeqs last(is_gone_.size());
  for (size_t r = 0; r < last.size(); ++r) {
    if (const auto& theirs = (*answers_)[r]) {
      last[r] = (*theirs)[static_cast<size_t>(path)];
    }
  }
  last[static_cast<size_t>(health_.rank())] = progress_[static_cast<size_t>(path)];
  return last;
}

bool StorePeers::take_question() {
  std::lock_guard lock(mutex_);
  return std::exchange(is_asking_, false);
}

void StorePeers::answer(Answers answers) {
  std::lock_guard lock(mutex_);
  take_answers(std::move(answers), Clock::now());
}

void StorePeers::ask_nobody() {
  std::lock_guard lock(mutex_);
  if (!asks_nobody_since_) {
    asks_nobody_since_ = Clock::now();
  }
  is_asking_ = false;
}

void StorePeers::take_answers(Answers answers, Clock::time_point now) {
  answers.resize(is_gone_.size());
  answers_ = std::move(answers);
  answered_at_ = now;
}

void StorePeers::deliver(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (!delivered_ && !health_.has_failed()) {
    delivered_ = failure;
  }
}

void StorePeers::lose(int rank) {
  std::lock_guard lock(mutex_);
  is_gone_.at(static_cast<size_t>(rank)) = true;
}

StorePeers::Agreement StorePeers::agreement() const {
  std::lock_guard lock(mutex_);
  if (!agreement_.post) {
    throw ClosedError(health_.prefix(0) + "the communicator is closed");
  }
  return agreement_;
}

void StorePeers::await_leave() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return health_.is_closing(); });
}

bool StorePeers::await_failure() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return health_.has_failed() || health_.is_closing(); });
  return health_.has_failed();
}

void StorePeers::finish() {
  std::lock_guard lock(mutex_);
  ++finished_;
  changed_.notify_all();
}

void StorePeers::leave(Deadline deadline) {
  Agreement agreement;  // freed without the lock
  std::unique_lock lock(mutex_);
  health_.start_closing();
  changed_.notify_all();
  changed_.wait_until(lock, earlier(deadline, Clock::now() + kLeavePatience), [this] { return finished_ == kThreads; });
  std::swap(agreement, agreement_);
}

}  // namespace bucketwheel
