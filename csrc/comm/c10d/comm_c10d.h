// The `c10d` backend: tensors of the CPU over a torch process group, for ranks that share no memory. The process group
// is behind a Wire; its calls come from the communicator's stream, one operation after the other.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/c10d/wire.h"
#include "comm/c10d/wire_exchange.h"
#include "comm/comm.h"
#include "comm/flight.h"
#include "comm/issue_order.h"
#include "comm/peers/peers.h"
#include "comm/peers/watchdog.h"

namespace bucketwheel {

class C10dComm final : public Comm {
 public:
  // Somebody has to interrupt what waits in the wire once `peers` has failed: the communicator waits for that.
  C10dComm(PeersRef peers, std::unique_ptr<Wire> wire, PoolRef pool);
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
  void post(std::span<const std::byte> payload) override;
  std::vector<std::vector<std::byte>> collect(Deadline deadline, const std::function<void()>& poll) override;
  void abort(const std::string& reason) noexcept override;
  // Also waits until the peers have received what this rank has sent. CommTimeout when they have not at the time limit of
  // an operation; it is closed all the same.
  void close(Deadline deadline) override;

 private:
  struct Running {
    const Operation* op;  // null: close() waits for the peers
    Clock::time_point since;
  };
  std::exception_ptr execute(const Operation& op, const char* name);
  void set_running(std::optional<Running> running);
  std::exception_ptr lost(const WireBroken& broken, const Operation& op, const char* name);
  std::exception_ptr fail(const Failure& failure, const char* op = "");
  void settle();
  void look() noexcept;
  void expect_progress();

  const PeersRef peers_;
  std::unique_ptr<Wire> wire_;
  std::unique_ptr<WireRooms> rooms_;
  const PoolRef pool_;
  FlightRing flight_;
  std::mutex running_mutex_;
  std::optional<Running> running_;
  std::mutex close_mutex_;
  std::atomic<bool> is_closing_{false};
  bool is_closed_ = false;
  std::atomic<bool> is_late_{false};  // the time limit has ended the wait of close()
  IssueOrder order_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace bucketwheel
