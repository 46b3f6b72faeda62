// HostComm: the communicator of ranks that share memory. What differs between threads and processes is its Transport.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "comm/comm.h"
#include "comm/failure.h"
#include "comm/flight.h"
#include "comm/host/team.h"
#include "comm/issue_order.h"
#include "comm/peers/peers.h"
#include "comm/peers/watchdog.h"

namespace bucketwheel {

struct HostCommOptions {
  int rank = 0;
  std::string name;
  std::chrono::nanoseconds timeout{};  // of an operation, from when the stream reaches it
  std::string id{};                    // of Health
};

class HostComm final : public Comm, public Peers {
 public:
  // `control_owner` keeps the memory under `control` mapped.
  HostComm(HostCommOptions options, Control control, std::shared_ptr<void> control_owner,
           std::unique_ptr<Transport> transport);
  // Closes; operations that are still running after a grace of some seconds fail.
  ~HostComm() override;

  int rank() const override { return team_->rank(); }
  int world() const override { return team_->world(); }
  const std::string& name() const override { return health_.name(); }
  const char* backend() const override { return team_->transport().backend(); }
  const PoolRef& pool() const override { return team_->transport().pool(); }
  StreamRef stream() const override { return order_.stream(); }

  HandleRef issue(std::shared_ptr<Operation> op, IssueOptions options) override {
    return order_.issue(std::move(op), std::move(options));
  }
  void expect_usable() const override { health_.expect_usable(); }
  Peers& peers() override { return *this; }
  void post(std::span<const std::byte> payload) override;
  std::vector<std::vector<std::byte>> collect(Deadline deadline, const std::function<void()>& poll) override;
  void abort(const std::string& reason) noexcept override;
  void close(Deadline deadline) override;

  // ---- for a communicator that moves data by other means and leaves agreement and failure to this one

  Health& health() override { return health_; }
  std::chrono::nanoseconds timeout() const override { return options_.timeout; }
  std::optional<Failure> trouble(uint64_t seq, const std::function<bool(int)>& needs, const char* what) override;
  std::exception_ptr fail(const Failure& failure, const FailedAt& at) override;
  void note_issued(int path, uint64_t seq) override { team_->own().issued[path] = seq; }
  bool sees_issued() const override { return true; }
  bool have_all_issued(int path, uint64_t seq) const override;
  std::optional<LastSeqs> last_seqs(int path) override { return seqs_of_all(path); }
  PublicCall& call() override { return team_->own().call; }
  FlightRing& flight() { return flight_; }
  // Another communicator has the operations, and writes them out.
  void leave_flight_to_another() { has_flight_ = false; }

 private:
  void leave(Deadline deadline) override { close(deadline); }
  std::exception_ptr execute(const Operation& op, const char* name);
  LastSeqs seqs_of_all(int path) const;
  std::string describe(int rank) const override { return team_->transport().describe_peer(rank); }
  std::string call_of(int rank) const override { return team_->record(rank).call.text(); }
  void look();

  const HostCommOptions options_;
  Health health_;
  const std::shared_ptr<void> control_owner_;
  std::unique_ptr<Team> team_;
  FlightRing flight_;
  std::atomic<bool> has_flight_{true};

  IssueOrder order_;

  std::mutex payload_mutex_;
  uint64_t posted_ = 0;
  uint64_t collected_ = 0;

  std::mutex close_mutex_;
  std::atomic<bool> is_closed_{false};
  std::shared_ptr<Watch> watch_;
};

}  // namespace bucketwheel
