// The `nccl` backend: every rank has a GPU, or shares one where NCCL can do that.
//
// Operations go into a stream at once; the communicator keeps what they use until the device has done them. Agreement
// between hosts, and the knowledge that peers live, are those of its Peers.
//
// [Note: two communicators] NCCL runs the operations of one communicator one after the other, whatever streams they are
// in, so an all-gather and a reduce-scatter overlap only on two. NcclComm::pair() makes these. Kernels of two
// communicators may wait for each other across GPUs unless every GPU starts them in the same order: NCCL sees to that
// when NCCL_LAUNCH_ORDER_IMPLICIT=1 was there before its first launch, and every rank issues in the same order. Where
// that is not known, `serialises`: the operations of the two wait for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.h"
#include "comm/flight.h"
#include "comm/nccl/inflight.h"
#include "comm/nccl/session.h"
#include "comm/operation.h"
#include "comm/peers/peers.h"
#include "comm/peers/watchdog.h"
#include "device/device_cuda.h"

namespace bucketwheel {

struct NcclOptions {
  NcclConfig config;
  bool registers_memory = false;  // pools are of registered memory (memory.h); else `pool`
  PoolRef pool;
  bool serialises = false;  // [Note: two communicators]
  std::function<void()>
      poll;  // called while the making, split(), register_pool() and operations that cannot be issued yet wait; may throw
  // Debug: called before every operation with its seq and what it is (kind, sizes, places in registered memory).
  // Returns how the ranks differ, if they do: a MismatchError.
  std::function<std::string(const std::string& comm, uint64_t seq, const std::string& text)> check;
};

class NcclMemory;

class NcclComm final : public Comm {
 public:
  using Ref = std::shared_ptr<NcclComm>;
  // All are collective, and fail as NcclSession says, or with the error of `peers`.
  static Ref make(const PeersRef& peers, int device, const NcclUniqueId& id, const NcclOptions& options,
                  Deadline deadline);
  // The first for all-gathers, the second for reduce-scatters; their names end in "/ag" and "/rs".
  static std::pair<Ref, Ref> pair(const PeersRef& peers, int device, const NcclUniqueId& id, const NcclOptions& options,
                                  Deadline deadline);
  // Called by all ranks of this communicator; `peers` is that of the new one, null with a color < 0 (then null comes
  // back). New ranks are in the order of `key`, then of the old ranks. Where it fails on a rank, this communicator does.
  Ref split(const PeersRef& peers, int color, int key, const NcclOptions& options, Deadline deadline);

  ~NcclComm() override;

  int rank() const override { return session_->rank(); }
  int world() const override { return session_->world(); }
  const std::string& name() const override { return name_; }
  const char* backend() const override { return "nccl"; }
  bool sees_peers() const override { return peers_->sees_issued(); }
  DeviceId device() const override { return {DeviceId::Kind::kCuda, session_->device()}; }
  const PoolRef& pool() const override { return pool_; }
  StreamRef stream() const override { return stream_; }
  const NcclApi& api() const { return session_->api(); }
  // Whether all of the pool's memory is in windows of NCCL.
  bool has_windows() const;
  // Collective, at a point that all ranks agree on: what the pool got from the system since the last time becomes
  // registered memory. Before that, and where NCCL refuses, it works like any other. The number of new windows.
  size_t register_pool();

  HandleRef issue(std::shared_ptr<Operation> op, IssueOptions options) override;
  void expect_usable() const override;
  Peers& peers() override { return *peers_; }
  void abort(const std::string& reason) noexcept override;
  void close(Deadline deadline) override;

 private:
  // Alive while a thread is inside NCCL with this communicator, or about to be unless it sees that this is closing.
  class Inside {
   public:
    explicit Inside(std::atomic<int>& count) : count_(count) { ++count_; }
    ~Inside() { --count_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    std::atomic<int>& count_;
  };
  struct Turn {  // of two communicators that take turns
    EventRef last_done;
  };

  NcclComm(PeersRef peers, std::shared_ptr<NcclSession> session, const std::string& part, NcclOptions options,
           std::shared_ptr<Turn> turn);
  static Ref around(const PeersRef& peers, const std::shared_ptr<NcclSession>& session, const std::string& part,
                    const NcclOptions& options, std::shared_ptr<Turn> turn);
  std::vector<EventRef> order(Stream& stream, const IssueOptions& options, bool is_captured);
  static EventRef try_record(Stream& stream) noexcept;
  NcclSession::IssueLock lock_to_issue(const Operation& op);
  std::shared_ptr<Handle::State> new_state(const Operation& op, bool is_captured) const;
  void expect_same_call(const Operation& op);
  // CaptureError where an operation cannot be part of the graph that is being captured, or has nothing to do with it.
  void expect_one_capture(bool is_captured, const IssueOptions& options);
  std::string place_text(const Operation& op) const;
  std::exception_ptr fail(Failure failure, const char* op = "");
  // What a call that needs all ranks failed with. Asks them how far they are, which may take a moment.
  Failure failure_of_call(const CommError& error);
  void give_up(const std::exception_ptr& error);

  void look() noexcept;
  void expect_progress();

  const PeersRef peers_;
  const std::shared_ptr<NcclSession> session_;
  const std::string part_;
  const std::string name_;
  const std::shared_ptr<const std::string> who_;  // of messages
  const NcclOptions options_;
  const std::shared_ptr<Turn> turn_;  // null: no taking of turns
  StreamRef stream_;
  std::shared_ptr<NcclMemory> memory_;
  PoolRef pool_;
  FlightRing flight_;

  uint64_t seq_ = 0;  // guarded by the session's mutex
  std::atomic<uint64_t> issued_{0};
  Inflight inflight_{flight_};
  std::optional<Clock::time_point> error_since_;  // the watchdog's: NCCL reports an error
  std::atomic<int> inside_{0};
  std::atomic<bool> is_closing_{false};
  std::mutex close_mutex_;
  std::atomic<bool> is_closed_{false};
  std::shared_ptr<Watch> watch_;
};

}  // namespace bucketwheel
