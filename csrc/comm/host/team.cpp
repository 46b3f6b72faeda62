#include "comm/host/team.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "base/align.h"
#include "base/futex.h"
#include "base/mapping.h"
#include "base/platform.h"

namespace bucketwheel {
namespace {

constexpr size_t kRecordBytes = round_up(sizeof(RankRecord), kPageBytes);

// The records of all ranks, then the staging buffers, then the payloads: a page belongs to one rank and one purpose,
// and pages that nobody uses never exist. A page lies in the memory of the NUMA node of whoever touches it first, if only
// to read it. Of staging buffers and payloads that is the owner, who announces what is in them; of a record it may be a
// peer that looks whether the rank has come or failed.
size_t staging_at(int world) { return kRecordBytes * static_cast<size_t>(world); }
size_t payload_at(int world) {
  return staging_at(world) + Control::kStagingSlots * Control::staging_bytes(world) * static_cast<size_t>(world);
}

}  // namespace

size_t Control::staging_bytes(int world) {
  // A reduce-scatter stages a window for each peer: room for at least one block of the largest type in each.
  constexpr size_t kLeastBytes = size_t{256} << 10;
  constexpr size_t kWindowBytes = size_t{32} << 10;
  return std::max(kLeastBytes, kWindowBytes * static_cast<size_t>(world));
}

size_t Control::size_bytes(int world) { return payload_at(world) + 2 * kPayloadBytes * static_cast<size_t>(world); }

RankRecord& Control::record(int rank) const {
  return *reinterpret_cast<RankRecord*>(base_ + kRecordBytes * static_cast<size_t>(rank));
}

std::byte* Control::staging(int rank, int slot) const {
  return base_ + staging_at(world_) + staging_bytes(world_) * static_cast<size_t>(rank * kStagingSlots + slot);
}

std::byte* Control::payload(int rank, int slot) const {
  return base_ + payload_at(world_) + kPayloadBytes * static_cast<size_t>(rank * 2 + slot);
}

void ring(RankRecord& record) {
  if (record.sleepers.load() != 0) {
    record.bell.fetch_add(1);
    futex_wake_all(record.bell, FutexScope::kShared);
  }
}

namespace {

// [Note: adaptive spin] A peer that is about to arrive is met in a microsecond by spinning, in 5 to 50 by sleeping. One
// that computes for a millisecond should cost next to nothing meanwhile. So a wait spins before it sleeps, twice as long
// when spinning would have met the peer, half as long when it did not. After a moment, or at once where ranks outnumber
// cores, it yields between two looks: the peer, or a thread of this rank that computes, may want the very core.
// bench_comm.py --worlds 4, all-gather of 64 KiB in place, 2 cores of an AMD EPYC: 48 us at commit 3fd2f91, 182 where
// ranks sleep at once (f49b275).
constexpr int64_t kLeastSpinNs = 20'000;
constexpr int64_t kMostSpinNs = 50'000;
constexpr int64_t kKeepsCoreNs = 5'000;

// A sleeper looks around this often even if nobody rings: a killed rank cannot ring.
constexpr std::chrono::milliseconds kSleepSlice{100};

// A reader finishes its copy, or sees the failure, in much less.
constexpr std::chrono::seconds kReadersPatience{30};

constexpr char kOrigin[] = " failed first: ";

template <size_t kBytes>
void put_text(char (&place)[kBytes], const std::string& text) {
  const size_t length = std::min(text.size(), kBytes - 1);
  std::memcpy(place, text.data(), length);
  place[length] = 0;
}

template <size_t kBytes>
std::string text_at(const char (&place)[kBytes]) {
  return {place, strnlen(place, kBytes)};
}

// The operation that `record`'s rank has failed in, if that concerns `wait`.
std::optional<uint64_t> failed_seq(const RankRecord& record, const Team::Wait& wait) {
  if (record.failure == FailureKind::kNone) {
    return {};
  }
  const uint64_t seq = record.failure_seq;
  return wait.seq == 0 || seq <= wait.seq ? std::optional(seq) : std::nullopt;
}

}  // namespace

Team::Team(int rank, Control control, std::unique_ptr<Transport> transport, Health& health)
    : rank_(rank),
      control_(control),
      transport_(std::move(transport)),
      health_(health),
      has_cores_(std::thread::hardware_concurrency() >= static_cast<unsigned>(control.world())),
      spin_ns_(kMostSpinNs / 2) {}

void Team::ring_peers() const {
  for (int r = 0; r < world(); ++r) {
    if (r != rank_) {
      ring(record(r));
    }
  }
}

void Team::await_slow(const Wait& wait, const IsReady& is_ready, const Needs& needs) {
  if (spin(is_ready)) {
    return;
  }
  RankRecord& own_record = own();
  own_record.sleepers.fetch_add(1);
  struct Awake {
    RankRecord& record;
    ~Awake() { record.sleepers.fetch_sub(1); }
  } awake{own_record};
  const auto begin = Clock::now();
  Wait lasting = wait;
  for (;;) {
    const uint32_t seen = own_record.bell.load();
    if (is_ready()) {
      break;
    }
    expect_no_trouble(lasting, is_ready, needs);
    if (has_passed(wait.deadline)) {
      throw_timeout(wait, needs);
    }
    if (health_.reports().is_due(Clock::now() - begin)) {
      tell(wait, Clock::now() - begin, needs);
      lasting.is_told = true;
    }
    if (wait.poll != nullptr && *wait.poll) {
      (*wait.poll)();
    }
    futex_wait(own_record.bell, seen, earlier(wait.deadline, Clock::now() + kSleepSlice), FutexScope::kShared);
  }
  if (Clock::now() - begin < std::chrono::nanoseconds(kMostSpinNs)) {
    spin_ns_ = std::min(kMostSpinNs, 2 * spin_ns_);
  }
}

bool Team::spin(const IsReady& is_ready) {
  const auto begin = Clock::now();
  const auto yields_from = begin + std::chrono::nanoseconds(has_cores_ ? kKeepsCoreNs : 0);
  const auto end = begin + std::chrono::nanoseconds(spin_ns_.load(std::memory_order_relaxed));
  bool is_met = false;
  auto now = begin;
  while (!is_met && now < end) {
    if (now < yields_from) {
      for (int i = 0; i < 8 && !is_met; ++i) {
        cpu_relax();
        is_met = is_ready();
      }
    } else {
      std::this_thread::yield();  // another thread may run for a whole slice of its time
      is_met = is_ready();
    }
    now = Clock::now();
  }
  const bool was_worth_it = is_met && now - begin < std::chrono::nanoseconds(kMostSpinNs);
  spin_ns_ = was_worth_it ? std::min(kMostSpinNs, 2 * spin_ns_) : std::max(kLeastSpinNs, spin_ns_ / 2);
  return is_met;
}

// After each sign of trouble we look once more: what the rank did before it left, died or failed counts.
void Team::expect_no_trouble(const Wait& wait, const IsReady& is_ready, const Needs& needs) const {
  if (is_stopped_) {
    throw Failure(*stop_);
  }
  for (int r = 0; r < world(); ++r) {
    if (r == rank_) {
      continue;
    }
    if (failed_seq(record(r), wait)) {
      if (is_ready()) {
        return;
      }
      expect_not_failed(wait, r);
    }
    const bool has_left = record(r).has_left != 0;
    if (needs(r) && (has_left || transport_->is_dead(r))) {
      if (is_ready()) {
        return;
      }
      const char* const end = wait.is_told ? " has ended" : has_left ? " has closed the communicator" : " died";
      throw Failure{
          FailureKind::kPeer,
          "rank " + std::to_string(r) + " (" + transport_->describe_peer(r) + ")" + end + "; needed for " +
              text_of_wait(wait) + (wait.is_told ? text_of_missing(wait, needs) : "") +
              (wait.is_told && !has_left ? ". The output of that rank says whether it exited or was killed" : ""),
          r, wait.seq};
    }
  }
}

void Team::expect_not_failed(const Wait& wait, int rank) const {
  const RankRecord& theirs = record(rank);
  const std::optional<uint64_t> seq = failed_seq(theirs, wait);
  if (!seq) {
    return;
  }
  const FailureKind kind = theirs.failure;
  const std::string text = text_at(theirs.failure_text);
  const bool names_origin = kind == FailureKind::kAborted || text.find(kOrigin) != std::string::npos;
  throw Failure{kind,
                names_origin ? text : "rank " + std::to_string(rank) + kOrigin + text,
                theirs.failure_rank,
                *seq,
                theirs.failure_nccl_code,
                text_at(theirs.failure_last_error),
                {}};
}

bool Team::has_failed_peer() const {
  for (int r = 0; r < world(); ++r) {
    if (r != rank_ && record(r).failure != FailureKind::kNone) {
      return true;
    }
  }
  return false;
}

// Our own record describes the operation that we are in.
std::string Team::text_of_wait(const Wait& wait) const {
  if (wait.what != nullptr) {
    return wait.what;
  }
  const std::string what =
      wait.seq == 0 ? "collect() of round " + std::to_string(own().posted) : text_of(own().description);
  return own().call.in_call(what);
}

void Team::throw_timeout(const Wait& wait, const Needs& needs) const {
  throw Failure{FailureKind::kTimeout, "timeout in " + text_of_wait(wait) + text_of_missing(wait, needs), -1, wait.seq};
}

std::string Team::text_of_missing(const Wait& wait, const Needs& needs) const {
  const char* const op = wait.seq == 0 ? "exchange" : name_of(static_cast<Collective>(own().description.collective));
  std::vector<Missing> missing;
  for (int r = 0; r < world(); ++r) {
    if (r != rank_ && needs(r)) {
      const RankRecord& theirs = record(r);
      const bool has_called = theirs.entered != 0 || theirs.posted != 0 || !theirs.call.text().empty();
      missing.push_back({r, transport_->describe_peer(r), has_called ? theirs.call.text() : "has made no call",
                         "last seen in operation " + std::to_string(theirs.entered.load()),
                         wait.seq != 0 && theirs.entered >= wait.seq});
    }
  }
  return missing_text(missing, own().call.current(op));
}

// The lowest rank that waits does it.
void Team::tell(const Wait& wait, std::chrono::nanoseconds waited, const Needs& needs) const {
  int lowest = 0;
  while (lowest < rank_ && needs(lowest)) {
    ++lowest;
  }
  const auto limit = wait.deadline ? waited + (*wait.deadline - Clock::now()) : waited;
  const std::string text = lowest == rank_ ? text_of_wait(wait) + text_of_missing(wait, needs) : "";
  health_.reports().tell(waited, limit, health_.who(), text);
}

void Team::stop(Failure failure) {
  {
    std::lock_guard lock(mutex_);
    if (stop_) {
      return;
    }
    stop_ = std::make_unique<const Failure>(std::move(failure));
    is_stopped_ = true;
  }
  ring(own());
}

void Team::publish(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (is_published_) {
    return;
  }
  is_published_ = true;
  RankRecord& record = own();
  put_text(record.failure_text, failure.text);
  put_text(record.failure_last_error, failure.last_error);
  record.failure_nccl_code = failure.nccl_code;
  record.failure_rank = failure.rank;
  record.failure_seq = failure.seq;
  record.failure = failure.kind;
  ring_peers();
}

void Team::await_readers(uint64_t seq) {
  own().given_up = seq;
  if (!transport_->shares_inputs()) {
    return;
  }
  const auto until = Clock::now() + kReadersPatience;
  for (int r = 0; r < world(); ++r) {
    const RankRecord& theirs = record(r);
    while (r != rank_ && theirs.entered >= seq && theirs.finished < seq && theirs.given_up < seq &&
           theirs.has_left == 0 && !transport_->is_dead(r) && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

}  // namespace bucketwheel
