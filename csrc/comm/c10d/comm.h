// The `c10d` backend: tensors of the CPU over a torch process group, for ranks that share no memory. The group is called by
// the thread of the communicator's stream, one operation after the other.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/c10d/process_group.h"
#include "comm/comm.h"
#include "comm/flight.h"
#include "comm/issue_order.h"
#include "comm/peers/peers.h"
#include "comm/peers/watchdog.h"

namespace bucketwheel {

class C10dComm final : public Comm {
 public:
  // `group` is this communicator's alone.
  C10dComm(PeersRef peers, std::unique_ptr<ProcessGroup> group, PoolRef pool);
  // Closes; operations that are still running after a grace of some seconds fail.
  ~C10dComm() override;

  int rank() const override { return peers_->health().rank(); }
  int world() const override { return peers_->health().world(); }
  const std::string& name() const override { return peers_->health().name(); }
  const char* backend() const override { return "c10d"; }
  const PoolRef& pool() const override { return pool_; }
  StreamRef stream() const override { return order_.stream(); }

  HandleRef issue(std::shared_ptr<Operation> op, IssueOptions options) override;
  void expect_usable() const override;
  Peers& peers() override { return *peers_; }
  void abort(const std::string& reason) noexcept override;
  void close(Deadline deadline) override;

 private:
  struct Running {
    const Operation* op;
    Clock::time_point since;
    std::optional<Clock::time_point> waits_since;  // for an all_to_all
  };
  std::exception_ptr execute(const Operation& op, const char* name);
  void await(size_t room);
  void set_waits_since(std::optional<Clock::time_point> since);
  std::exception_ptr lost(const AllToAllFailed& failed, const Operation& op, const char* name);
  std::exception_ptr fail(const Failure& failure, const char* op = "");
  void look() noexcept;
  void expect_progress();

  const PeersRef peers_;
  std::unique_ptr<ProcessGroup> group_;
  const PoolRef pool_;
  FlightRing flight_;
  std::mutex running_mutex_;
  std::optional<Running> running_;  // the operation that the stream executes, for the watchdog
  std::mutex close_mutex_;          // who closes while another one does waits for the end of that
  std::atomic<bool> is_closing_{false};
  bool is_closed_ = false;
  IssueOrder order_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace bucketwheel
