#include "comm/host/host_comm.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/host/exchange.h"
#include "comm/peers/patience.h"

namespace bucketwheel {
HostComm::HostComm(HostCommOptions options, Control control, std::shared_ptr<void> control_owner,
                   std::unique_ptr<Transport> transport)
    : options_(std::move(options)),
      health_(options_.name, options_.rank, control.world(), options_.id),
      control_owner_(std::move(control_owner)),
      team_(std::make_unique<Team>(options_.rank, control, std::move(transport), health_)),
      flight_({options_.name, options_.rank, control.world(), team_->transport().backend(), health_.id()}),
      order_(
          health_, flight_, [this](const Operation& op, const char* name) { return execute(op, name); },
          IssueOrder::Runs::kInTheirStream) {
  if (world() > 1) {
    watch_ = watch([this] { look(); });
  }
}

HostComm::~HostComm() {
  if (health_.is_forked()) {
    (void)team_.release();  // its threads and locks are the parent's: leaked
    return;
  }
  watch_.reset();
  try {
    close(Clock::now() + kPatience.destructor);
  } catch (const std::exception&) {  // a destructor tells nobody; the peers see a rank that left
    team_->transport().leave();
  }
}

std::exception_ptr HostComm::execute(const Operation& op, const char* name) {
  std::exception_ptr error;
  try {
    if (health_.has_failed()) {
      error = health_.error();
    } else {
      Exchange(*team_, op, timeout_from_now()).run();
    }
  } catch (const Failure& failure) {
    error = fail(failure, {op.seq, name, ""});
  } catch (const std::exception& failure) {
    error = fail(failure_of(failure, rank(), op.seq), {op.seq, name, ""});
  }
  if (error) {
    team_->await_readers(op.seq);  // before the inputs are freed
  }
  return error;
}

void HostComm::post(std::span<const std::byte> payload) {
  std::lock_guard lock(payload_mutex_);
  expect_usable();
  BW_EXPECTS(payload.size() <= kMaxPayloadBytes, "post: the payload has " + std::to_string(payload.size()) +
                                                     " bytes, at most " + std::to_string(kMaxPayloadBytes) + " fit");
  BW_EXPECTS(posted_ == collected_, "post: round " + std::to_string(posted_) + " is posted but not collected");
  // Two slots are enough: a peer posts round n + 1 only after it has collected round n, and nobody can have collected
  // n + 1 before that, so whoever posts n + 2 knows that round n has been read by all.
  const uint64_t round = ++posted_;
  const int slot = static_cast<int>(round % 2);
  RankRecord& own = team_->own();
  if (!payload.empty()) {
    std::memcpy(team_->control().payload(rank(), slot), payload.data(), payload.size());
  }
  own.payload_bytes[slot] = payload.size();
  own.posted = round;
  team_->ring_peers();
}

std::vector<std::vector<std::byte>> HostComm::collect(Deadline deadline, const std::function<void()>& poll) {
  std::lock_guard lock(payload_mutex_);
  expect_usable();
  BW_EXPECTS(posted_ == collected_ + 1, "collect: nothing is posted");
  const uint64_t round = posted_;
  const int slot = static_cast<int>(round % 2);
  const Clock::time_point own_deadline = timeout_from_now();
  const auto is_missing = [&](int r) { return team_->record(r).posted < round; };
  std::vector<std::vector<std::byte>> payloads;
  try {
    for (int r = 0; r < world(); ++r) {
      team_->await({0, earlier(deadline, own_deadline), &poll}, [&] { return !is_missing(r); }, is_missing);
      const std::byte* payload = team_->control().payload(r, slot);
      payloads.emplace_back(payload, payload + team_->record(r).payload_bytes[slot]);
    }
  } catch (const Failure& failure) {
    const bool is_callers_limit = has_passed(deadline) && !has_passed(own_deadline);
    if (failure.kind == FailureKind::kTimeout && is_callers_limit && !team_->has_failed_peer()) {
      throw CommTimeout(health_.prefix(health_.last_seq()) + failure.text,
                        {.seq = health_.last_seq(), .last_seqs = seqs_of_all(0)});
    }
    std::rethrow_exception(fail(failure, {.seq = health_.last_seq()}));
  }
  collected_ = round;
  return payloads;
}

void HostComm::abort(const std::string& reason) noexcept {
  if (!health_.is_forked() && !is_closed_) {
    fail({FailureKind::kAborted, "aborted by rank " + std::to_string(rank()) + ": " + reason, rank()},
         {.seq = health_.last_seq()});
  }
}

void HostComm::close(Deadline deadline) {
  if (health_.is_forked()) {
    return;  // the parent's communicator is not the child's to close
  }
  std::lock_guard lock(close_mutex_);
  if (is_closed_) {
    return;
  }
  health_.start_closing();
  order_.stop(deadline, [this] {
    fail({FailureKind::kClosed, "closed while operations were in flight"}, {.seq = health_.last_seq()});
  });
  is_closed_ = true;
  team_->own().has_left = 1;
  team_->ring_peers();
  team_->stop({FailureKind::kClosed, "the communicator is closed"});
  team_->transport().leave();
  order_.stream()->close();
}

std::optional<Failure> HostComm::trouble(uint64_t seq, const std::function<bool(int)>& needs, const char* what) {
  try {
    team_->expect_no_trouble({seq, {}, nullptr, what}, [] { return false; }, needs);
    return {};
  } catch (const Failure& failure) {
    return failure;
  }
}

bool HostComm::have_all_issued(int path, uint64_t seq) const {
  for (int r = 0; r < world(); ++r) {
    if (team_->record(r).issued[path] < seq) {
      return false;
    }
  }
  return true;
}

// Of its own operations, a rank says only which ones its stream has reached.
LastSeqs HostComm::seqs_of_all(int path) const {
  LastSeqs last;
  for (int r = 0; r < world(); ++r) {
    const RankRecord& record = team_->record(r);
    last.emplace_back(std::max(record.entered.load(), record.issued[path].load()));
  }
  return last;
}

std::exception_ptr HostComm::fail(const Failure& failure, const FailedAt& at) {
  Failure told = failure;
  if (told.kind == FailureKind::kTimeout && told.last_seqs.empty()) {
    told.last_seqs = seqs_of_all(0);
  }
  const Health::Verdict verdict = health_.fail(told, at);
  if (verdict.is_first) {
    if (told.kind == FailureKind::kClosed) {
      team_->publish({FailureKind::kPeer, "rank " + std::to_string(rank()) + " " + told.text, rank(), told.seq});
    } else {
      team_->publish(told);
      if (has_flight_) {
        flight_.write(verdict.message);
      }
    }
    team_->stop(std::move(told));
  }
  return verdict.error;
}

// Called by the watchdog. A rank that is busy elsewhere does not notice that a peer failed; its last operations are
// written out all the same, for they may be why.
void HostComm::look() {
  if (!has_flight_ || flight_.has_tried() || health_.is_closing()) {
    return;
  }
  if (const auto failure = trouble(0, [](int) { return false; }, nullptr)) {
    flight_.write(health_.prefix(health_.last_seq()) + "(not noticed yet) " + failure->text);
  }
}

}  // namespace bucketwheel
