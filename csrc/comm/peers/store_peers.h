// StorePeers: the peers of ranks that do not share a host: [Note: ranks of several hosts], comm/peers/link.h.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/peers/link.h"
#include "comm/peers/peers.h"
#include "comm/peers/watchdog.h"

namespace bucketwheel {

// Wakes the thread of a process that reads and writes the Store, which waits here without the GIL.
class Bell {
 public:
  void ring();
  // Until it is rung, or was since the last time; or until `deadline`.
  void wait(Deadline deadline);

 private:
  std::mutex mutex_;
  std::condition_variable rung_;
  bool is_rung_ = false;
};

class StorePeers final : public Peers {
 public:
  using Payloads = std::vector<std::vector<std::byte>>;
  struct Neighbour {
    int rank;
    LinkRef link;
  };
  // How the ranks reach each other. The functions carry the payloads; they throw what post() and collect() throw.
  struct Ways {
    std::function<void(std::span<const std::byte>)> post;
    std::function<Payloads(Deadline, const std::function<void()>&)> collect;
    std::vector<Neighbour> neighbours{};  // the next rank and the one before
    std::shared_ptr<Bell> bell = std::make_shared<Bell>();
  };
  StorePeers(std::string name, int rank, int world, std::chrono::nanoseconds timeout, Ways ways, std::string id = {});

  Health& health() override { return health_; }
  std::chrono::nanoseconds timeout() const override { return timeout_; }
  void post(std::span<const std::byte> payload) override;
  Payloads collect(Deadline deadline, const std::function<void()>& poll) override;
  std::optional<Failure> trouble(uint64_t seq, const std::function<bool(int)>& needs, const char* what) override;
  std::exception_ptr fail(const Failure& failure, const FailedAt& at) override;
  void note_issued(int path, uint64_t seq) override { progress_.at(static_cast<size_t>(path)) = seq; }
  bool sees_issued() const override { return false; }
  bool have_all_issued(int, uint64_t) const override { return true; }
  std::optional<LastSeqs> last_seqs(int path) override;
  PublicCall& call() override { return call_; }
  // The same of the rounds that have been posted.
  std::optional<LastSeqs> last_rounds() { return last_seqs(kPaths); }

  // ---- for the thread that reads and writes the Store

  // What the ranks are to be told, until told(): what this one has failed with, or that a neighbour has died.
  std::optional<Failure> report() const;
  void told();
  // The failure that all ranks get: the first that comes counts.
  void deliver(const Failure& failure);
  // Nobody can be told or asked any more.
  void lose_store();
  bool has_left() const { return health_.is_closing(); }

  // How far a rank has come, on each data path and in rounds; and PublicCall::text().
  static constexpr int kCounts = kPaths + 1;
  using Progress = std::pair<std::array<uint64_t, kCounts>, std::string>;
  Progress progress() const;
  // By rank; nothing for one of which that is not known.
  using Answers = std::vector<std::optional<Progress>>;
  // Whether this rank wants to know how far all have come, until answer().
  bool asks() const;
  void answer(Answers answers);

 private:
  // A neighbour that has left, or has died.
  struct Gone {
    Clock::time_point since;
    std::optional<Failure> death;
  };
  void look() noexcept;
  void look_at(const Neighbour& one);
  void leave(Deadline deadline) override;
  std::string describe(int) const override { return ""; }
  std::string call_of(int rank) const override;
  void forget_answers() override;
  Ways ways() const;

  Health health_;
  const std::chrono::nanoseconds timeout_;
  const uint64_t id_;  // of the communicator, on the Links
  mutable std::mutex mutex_;
  std::condition_variable changed_;           // the health, or report_
  std::optional<Ways> ways_;                  // until leave(): its functions may hold us
  std::optional<Failure> report_;             // until it has been told, or cannot be
  std::optional<Clock::time_point> told_at_;  // stays
  std::optional<Failure> delivered_;          // the first failure of all ranks; stays
  std::vector<std::optional<Gone>> gone_;     // by rank, of neighbours; stays
  std::optional<Clock::time_point> store_lost_at_;
  std::array<std::atomic<uint64_t>, kCounts> progress_{};
  PublicCall call_{};
  std::optional<Clock::time_point> asked_at_;  // by a wait that lasts; until its report, as the answers
  std::optional<Answers> answers_;
  const std::shared_ptr<Watch> watch_;  // the first to go
};

}  // namespace bucketwheel
