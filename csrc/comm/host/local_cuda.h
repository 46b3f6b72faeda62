// The `local` backend on CUDA: the ranks are threads of one process and share one device.
//
// [Note: the last one launches]
// A CUDA stream can only wait for work that is already in a stream, so an operation goes into the world's one stream
// when its last rank has issued it, behind every rank's own work so far. Issuing never waits for a peer (but where
// `after` names an operation of another communicator that its peers have not issued yet). Waiting, even in a stream,
// blocks the host until all ranks have issued (DeferredEvent), but not until the device is done. Ranks therefore run
// their own backward in their own threads: torch.autograd.set_multithreading_enabled(False).
//
// Agreement between hosts, failures and timeouts are those of a HostComm that each rank has beside.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/host/host_comm.h"
#include "comm/operation.h"
#include "device/deferred_event.h"

namespace bucketwheel {

// Where the ranks of one world meet. Thread-safe.
class LocalCudaBoard {
 public:
  LocalCudaBoard(int device_index, int world) : device_index_(device_index), world_(world) {}
  ~LocalCudaBoard();  // waits for what the device has not done

  struct Arrival {
    std::shared_ptr<const Operation> op;
    EventRef ready;               // this rank's inputs are complete, its outputs nobody's any more
    std::vector<EventRef> after;  // what else comes first
    bool timing = false;
    std::shared_ptr<DeferredEvent> done;
    std::vector<Handle::Keepalive> keepalive;
    std::shared_ptr<HostComm> host;
  };
  // Registers what `rank` issued; the last rank enqueues the operation for all.
  void arrive(int rank, Arrival arrival);
  // `rank` has closed: what it issued that nobody has met is forgotten, and what the device has finished is freed.
  void leave(int rank);
  bool has_arrived(int rank, uint64_t seq) const;

  int device_index() const { return device_index_; }
  StreamRef stream() const;

 private:
  using Meeting = std::vector<std::unique_ptr<Arrival>>;  // by rank
  // With the lock held, so nothing here or in a sink may allocate device memory: emptying caches may wait for
  // operations that have yet to come in here, and for locks of whoever is waiting here.
  void launch(Meeting& meeting);
  void enqueue(const Meeting& meeting);
  void launch_all_gather(const Meeting& meeting);
  void launch_broadcast(const Meeting& meeting);
  void launch_reduce_scatter(const Meeting& meeting);
  struct Finished {
    EventRef done;  // null: never known to be over
    std::vector<Handle::Keepalive> keepalive;
    std::weak_ptr<HostComm> host;
    uint64_t seq = 0;
  };
  // With the lock held; what is returned is to be destroyed without it: owners of tensors may need other locks.
  std::vector<Finished> take_finished();

  const int device_index_;
  const int world_;
  mutable std::mutex mutex_;
  StreamRef stream_;
  std::map<uint64_t, Meeting> meetings_;  // by seq; not enqueued yet
  std::deque<Finished> running_;          // what the device may still use, in order
};

class LocalCudaComm final : public Comm {
 public:
  LocalCudaComm(std::shared_ptr<HostComm> host, std::shared_ptr<LocalCudaBoard> board, PoolRef pool);
  ~LocalCudaComm() override;

  int rank() const override { return host_->rank(); }
  int world() const override { return host_->world(); }
  const std::string& name() const override { return host_->name(); }
  const char* backend() const override { return "local"; }
  DeviceId device() const override { return {DeviceId::Kind::kCuda, board_->device_index()}; }
  const PoolRef& pool() const override { return pool_; }
  StreamRef stream() const override { return board_->stream(); }

  HandleRef issue(std::shared_ptr<Operation> op, IssueOptions options) override;
  void expect_usable() const override { host_->expect_usable(); }
  Peers& peers() override { return *host_; }
  void abort(const std::string& reason) noexcept override { host_->abort(reason); }
  void close(Deadline deadline) override;

 private:
  const std::shared_ptr<HostComm> host_;
  const std::shared_ptr<const std::string> who_;  // of messages
  const std::shared_ptr<LocalCudaBoard> board_;
  const PoolRef pool_;
  std::mutex issue_mutex_;
  uint64_t seq_ = 0;
  std::shared_ptr<DeferredEvent> last_done_;
};

}  // namespace bucketwheel
