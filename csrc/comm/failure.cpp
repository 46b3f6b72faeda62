#include "comm/failure.h"

#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace bucketwheel {
namespace {

std::exception_ptr exception_of(const Failure& failure, const std::string& message, CommFacts facts, int own_rank) {
  const bool is_peers_abort = failure.kind == FailureKind::kAborted && failure.rank >= 0 && failure.rank != own_rank;
  switch (is_peers_abort ? FailureKind::kPeer : failure.kind) {
    case FailureKind::kPeer:
      return std::make_exception_ptr(PeerError(message, std::move(facts)));
    case FailureKind::kTimeout:
      return std::make_exception_ptr(CommTimeout(message, std::move(facts)));
    case FailureKind::kMismatch:
      return std::make_exception_ptr(MismatchError(message, std::move(facts)));
    case FailureKind::kClosed:
      return std::make_exception_ptr(ClosedError(message, std::move(facts)));
    default:
      return std::make_exception_ptr(CommError(message, std::move(facts)));
  }
}

}  // namespace

Failure failure_of(const std::exception& error, int rank, uint64_t seq) {
  Failure failure{FailureKind::kError, error.what(), rank, seq};
  if (const auto* comm_error = dynamic_cast<const CommError*>(&error)) {
    failure.nccl_code = comm_error->facts.nccl_code;
    failure.last_error = comm_error->facts.last_error;
  }
  if (dynamic_cast<const CommTimeout*>(&error) != nullptr) {
    failure.kind = FailureKind::kTimeout;
    failure.rank = -1;
  }
  return failure;
}

std::string random_id() {
  uint64_t bits = 0;
  if (getentropy(&bits, sizeof(bits)) != 0) {
    throw Error("cannot get random bytes: " + std::generic_category().message(errno));
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, bits);
  return text;
}

Health::Health(std::string name, int rank, int world, std::string id)
    : name_(std::move(name)), rank_(rank), world_(world), id_(id.empty() ? random_id() : std::move(id)) {}

std::string Health::who(const std::string& part) const {
  return "rank " + std::to_string(rank_) + "/" + std::to_string(world_) + " comm '" + name_ + part + "'";
}

void Health::expect_usable() const {
  if (is_forked()) {
    throw DeviceError(prefix(last_seq_) +
                      "the communicator belongs to the parent process; make a new one in the child");
  }
  if (is_closing_) {
    throw ClosedError(prefix(last_seq_) + "the communicator is closed", {.seq = last_seq_});
  }
  if (has_failed_) {
    std::rethrow_exception(error());
  }
}

Health::Verdict Health::fail(const Failure& failure, const FailedAt& at) {
  std::lock_guard lock(mutex_);
  const bool is_first = error_ == nullptr;
  if (is_first) {
    message_ = prefix(at.seq, at.part) + failure.text;
    CommFacts facts{at.op,       at.seq, failure.rank, failure.nccl_code, failure.last_error, failure.last_seqs,
                    failure.text};
    facts.last_seqs.resize(failure.kind == FailureKind::kTimeout ? static_cast<size_t>(world_) : 0);
    error_ = exception_of(failure, message_, std::move(facts), rank_);
    has_failed_ = true;
  }
  return {error_, message_, is_first};
}

std::exception_ptr Health::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

std::string Health::message() const {
  std::lock_guard lock(mutex_);
  return message_;
}

}  // namespace bucketwheel
