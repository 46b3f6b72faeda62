#include "comm/peers/store_peers.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "comm/comm.h"
#include "comm/peers/patience.h"

namespace bucketwheel {

void Bell::ring() {
  std::lock_guard lock(mutex_);
  is_rung_ = true;
  rung_.notify_all();
}

void Bell::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto is_rung = [this] { return is_rung_; };
  if (deadline) {
    rung_.wait_until(lock, *deadline, is_rung);
  } else {
    rung_.wait(lock, is_rung);
  }
  is_rung_ = false;
}

StorePeers::StorePeers(std::string name, int rank, int world, std::chrono::nanoseconds timeout, Ways ways,
                       std::string id)
    : health_(std::move(name), rank, world, std::move(id)),
      timeout_(timeout),
      id_(std::stoull(health_.id(), nullptr, 16)),
      ways_(std::move(ways)),
      gone_(static_cast<size_t>(world)),
      watch_(watch([this] { look(); })) {}

// ---- rounds

StorePeers::Ways StorePeers::ways() const {
  std::lock_guard lock(mutex_);
  if (!ways_) {
    throw ClosedError(health_.prefix(0) + "the communicator is closed");
  }
  return *ways_;
}

void StorePeers::post(std::span<const std::byte> payload) {
  health_.expect_usable();
  BW_EXPECTS(payload.size() <= Comm::kMaxPayloadBytes, "post: the payload has " + std::to_string(payload.size()) +
                                                           " bytes, at most " + std::to_string(Comm::kMaxPayloadBytes) +
                                                           " fit");
  ways().post(payload);
  ++progress_[kPaths];
}

StorePeers::Payloads StorePeers::collect(Deadline deadline, const std::function<void()>& poll) {
  health_.expect_usable();
  return ways().collect(deadline, poll);
}

// ---- failures

// Called by the watchdog.
void StorePeers::look() noexcept {
  std::vector<Neighbour> neighbours;
  {
    std::lock_guard lock(mutex_);
    if (ways_) {
      neighbours = ways_->neighbours;
    }
  }
  for (const Neighbour& one : neighbours) {
    look_at(one);
  }
}

void StorePeers::look_at(const Neighbour& one) {
  const Link::State state = one.link->look();
  const bool has_left = one.link->has_left(id_);
  std::lock_guard lock(mutex_);
  std::optional<Gone>& gone = gone_[static_cast<size_t>(one.rank)];
  if (gone || (state == Link::State::kOpen && !has_left) || !ways_) {
    return;
  }
  gone = Gone{Clock::now(), {}};
  if (!has_left) {
    const std::string rank = "rank " + std::to_string(one.rank);
    gone->death = {
        FailureKind::kPeer,
        state == Link::State::kLost ? rank + " cannot be reached: its host does not answer any more" : rank + " died",
        one.rank};
    if (!report_ && !delivered_ && !health_.has_failed()) {
      report_ = gone->death;
    }
  }
  ways_->bell->ring();  // the rank may have told why before it went
}

std::optional<Failure> StorePeers::trouble(uint64_t seq, const std::function<bool(int)>& needs, const char* what) {
  const Clock::time_point now = Clock::now();
  std::lock_guard lock(mutex_);
  if (delivered_ && (seq == 0 || delivered_->seq <= seq)) {
    return delivered_;
  }
  bool needs_others = false;
  for (int r = 0; r < health_.world(); ++r) {
    const auto& gone = gone_[static_cast<size_t>(r)];
    const bool is_known = gone && now - gone->since > (gone->death ? kPatience.peer : kPatience.read);
    if (is_known && gone->death) {
      return gone->death;
    }
    const bool is_needed = r != health_.rank() && needs(r);
    if (is_known && is_needed) {
      return Failure{FailureKind::kPeer,
                     "rank " + std::to_string(r) + " has closed the communicator; needed for " + what, r, seq};
    }
    needs_others = needs_others || is_needed;
  }
  if (needs_others && store_lost_at_ && now - *store_lost_at_ > kPatience.store) {
    return Failure{FailureKind::kPeer, "the Store of the process group is gone: the process that hosted it has ended",
                   -1, seq};
  }
  return {};
}

std::exception_ptr StorePeers::fail(const Failure& failure, const FailedAt& at) {
  const Health::Verdict verdict = health_.fail(failure, at);
  std::lock_guard lock(mutex_);
  if (verdict.is_first && !delivered_ && !store_lost_at_) {
    report_ = failure;
    if (failure.kind == FailureKind::kClosed) {
      report_ = {FailureKind::kPeer, "rank " + std::to_string(health_.rank()) + " " + failure.text, health_.rank(),
                 failure.seq};
    }
    if (ways_) {
      ways_->bell->ring();
    }
  }
  changed_.notify_all();
  return verdict.error;
}

std::optional<Failure> StorePeers::report() const {
  std::lock_guard lock(mutex_);
  return report_;
}

void StorePeers::told() {
  std::lock_guard lock(mutex_);
  report_.reset();
  told_at_ = Clock::now();
  changed_.notify_all();
}

void StorePeers::deliver(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (!delivered_ && !health_.has_failed()) {
    delivered_ = failure;
  }
}

void StorePeers::lose_store() {
  std::lock_guard lock(mutex_);
  store_lost_at_ = Clock::now();
  report_.reset();
  changed_.notify_all();
}

// ---- how far the ranks have come

StorePeers::Progress StorePeers::progress() const {
  Progress copy{{}, call_.text()};
  std::ranges::copy(progress_, copy.first.begin());
  return copy;
}

std::string StorePeers::call_of(int rank) const {
  std::lock_guard lock(mutex_);
  const auto r = static_cast<size_t>(rank);
  return answers_ && (*answers_)[r] ? (*answers_)[r]->second : "";
}

std::optional<LastSeqs> StorePeers::last_seqs(int path) {
  const auto now = Clock::now();
  std::lock_guard lock(mutex_);
  const bool is_over = (asked_at_ && now - *asked_at_ >= kPatience.answer) || store_lost_at_ || !ways_;
  if (!answers_ && is_over) {
    answers_ = Answers(gone_.size());
  }
  if (!answers_) {
    if (!asked_at_) {
      asked_at_ = now;
      ways_->bell->ring();
    }
    return {};
  }
  LastSeqs last(gone_.size());
  for (size_t r = 0; r < last.size(); ++r) {
    if (const auto& theirs = (*answers_)[r]) {
      last[r] = theirs->first[static_cast<size_t>(path)];
    }
  }
  last[static_cast<size_t>(health_.rank())] = progress_[static_cast<size_t>(path)];
  return last;
}

void StorePeers::forget_answers() {
  std::lock_guard lock(mutex_);
  asked_at_.reset();
  answers_.reset();
}

bool StorePeers::asks() const {
  std::lock_guard lock(mutex_);
  return asked_at_ && !answers_;
}

void StorePeers::answer(Answers answers) {
  std::lock_guard lock(mutex_);
  answers.resize(gone_.size());
  answers_ = std::move(answers);
}

void StorePeers::leave(Deadline deadline) {
  std::optional<Ways> ways;  // freed without the lock
  {
    std::unique_lock lock(mutex_);
    health_.start_closing();
    changed_.notify_all();
    changed_.wait_until(lock, earlier(deadline, Clock::now() + kPatience.goodbye), [this] { return !report_; });
    if (told_at_) {
      changed_.wait_until(lock, earlier(deadline, *told_at_ + kPatience.read), [] { return false; });
    }
    std::swap(ways, ways_);
  }
  if (ways) {
    for (const Neighbour& one : ways->neighbours) {
      one.link->tell_left(id_);
    }
    ways->bell->ring();
  }
}

}  // namespace bucketwheel
