// StorePeers: the peers of ranks that do not share a host. Payloads travel over a process group of the CPU, failures
// through the torch Store; both are reached from Python, whose threads carry out what is queued here.
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
#include <vector>

#include "comm/peers/peers.h"

namespace bucketwheel {

class StorePeers final : public Peers {
 public:
  using Payloads = std::vector<std::vector<std::byte>>;
  // How payloads travel; they throw what post() and collect() throw.
  struct Agreement {
    std::function<void(std::span<const std::byte>)> post;
    std::function<Payloads(Deadline, const std::function<void()>&)> collect;
  };
  StorePeers(std::string name, int rank, int world, std::chrono::nanoseconds timeout, Agreement agreement,
             std::string id = {});

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
  // The same of the rounds that have been posted.
  std::optional<LastSeqs> last_rounds() { return last_seqs(kPaths); }

  // ---- for the thread that reads and writes the Store

  // How far a rank has come: on each data path, and in rounds.
  static constexpr int kCounts = kPaths + 1;
  using Progress = std::array<uint64_t, kCounts>;
  Progress progress() const;
  // By rank; nothing for one that has not said so in time.
  using Answers = std::vector<std::optional<Progress>>;
  // Whether this rank wants to know how far all have come; once.
  bool take_question();
  void answer(Answers answers);
  // Nobody can be asked any more: whoever wants to know is told soon that nobody answers.
  void ask_nobody();

  // The failure that this rank has to tell its peers, once; nothing at the deadline, when there is a question, or when
  // there will be none.
  std::optional<Failure> take_report(Deadline deadline);
  // What a peer told: the first that comes counts.
  void deliver(const Failure& failure);
  // `rank` has said goodbye.
  void lose(int rank);
  bool has_left() const { return health_.is_closing(); }
  // Blocks until this rank leaves.
  void await_leave();
  // Blocks until this rank has failed, or leaves; whether it has failed.
  bool await_failure();
  // One of the kThreads threads has done what was to be done after that; the leaving rank waits for it a while.
  static constexpr int kThreads = 2;
  void finish();

 private:
  void leave(Deadline deadline) override;
  std::string describe(int) const override { return ""; }
  Agreement agreement() const;
  void take_answers(Answers answers, Clock::time_point now);

  Health health_;
  const std::chrono::nanoseconds timeout_;
  Agreement agreement_;  // until leave(); it holds us
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Failure> report_;
  std::optional<Failure> delivered_;
  std::vector<bool> is_gone_;
  int finished_ = 0;
  std::array<std::atomic<uint64_t>, kCounts> progress_{};
  std::optional<Clock::time_point> asked_at_;  // the last question, and what came of it
  bool is_asking_ = false;
  std::optional<Clock::time_point> asks_nobody_since_;
  std::optional<Answers> answers_;
  Clock::time_point answered_at_{};
};

}  // namespace bucketwheel
