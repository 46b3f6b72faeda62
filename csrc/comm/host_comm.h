// HostComm: the communicator of ranks that share memory. What differs between threads and processes is its Transport.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "comm/comm.h"
#include "comm/flight.h"
#include "comm/team.h"

namespace bucketwheel {

struct HostCommOptions {
  int rank = 0;
  std::string name;
  std::chrono::nanoseconds timeout{};  // of an operation, from when the stream reaches it
};

class HostComm final : public Comm {
 public:
  // `control_owner` keeps the memory under `control` mapped.
  HostComm(HostCommOptions options, Control control, std::shared_ptr<void> control_owner,
           std::unique_ptr<Transport> transport);
  // Closes; operations that are still running after a grace of some seconds fail.
  ~HostComm() override;

  int rank() const override { return team_->rank(); }
  int world() const override { return team_->world(); }
  const std::string& name() const override { return options_.name; }
  const char* backend() const override { return team_->transport().backend(); }
  const PoolRef& pool() const override { return team_->transport().pool(); }
  StreamRef stream() const override { return stream_; }

  HandleRef all_gather(std::span<const Segment> segments, const IssueOptions& options) override;
  HandleRef reduce_scatter(std::span<const Segment> segments, ReduceOp op, std::shared_ptr<ReduceSink> sink,
                           const IssueOptions& options) override;
  void post(std::span<const std::byte> payload) override;
  std::vector<std::vector<std::byte>> collect(Deadline deadline, const std::function<void()>& poll) override;
  void abort(const std::string& why) noexcept override;
  void close(Deadline deadline) override;

  // ---- for a communicator that moves data by other means and leaves agreement and failure to this one

  // Throws the communicator's error, or ClosedError.
  void expect_usable() const;
  // The same; and fails, and throws, when a rank for which needs(rank) holds has failed or left.
  void expect_peers(uint64_t seq, const std::function<bool(int)>& needs);
  // Makes `failure` the communicator's error, unless it has one, tells the peers, and returns the communicator's error.
  std::exception_ptr fail(const Failure& failure, uint64_t seq);
  Deadline timeout_from_now() const { return Clock::now() + options_.timeout; }

 private:
  HandleRef issue(std::shared_ptr<Operation> op, const IssueOptions& options);
  void execute(const Operation& op, Handle::State& state);
  std::string prefix(uint64_t seq) const;
  void write_flight(const std::string& reason) const noexcept;

  const HostCommOptions options_;
  const uint64_t fork_generation_;
  const std::shared_ptr<void> control_owner_;
  std::unique_ptr<Team> team_;
  StreamRef stream_;
  FlightRing flight_;

  std::mutex issue_mutex_;  // seq order is issue order; also guards the four below
  std::atomic<uint64_t> seq_{0};
  EventRef last_done_;
  bool last_was_own_stream_ = true;

  std::mutex payload_mutex_;
  uint64_t posted_ = 0;
  uint64_t collected_ = 0;

  mutable std::mutex error_mutex_;
  std::exception_ptr error_;
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_closing_{false};
  std::mutex close_mutex_;
  std::atomic<bool> is_closed_{false};
};

}  // namespace bucketwheel
