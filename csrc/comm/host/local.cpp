#include "comm/host/local.h"

#include <utility>

#include "base/error.h"
#include "comm/host/host_comm.h"
#include "comm/host/local_cuda.h"

namespace bucketwheel {
namespace {

class LocalTransport final : public Transport {
 public:
  explicit LocalTransport(bool stages_inputs)
      : stages_inputs_(stages_inputs), pool_(Pool::make(cpu_device(), make_host_upstream())) {}

  const char* backend() const override { return "local"; }
  const PoolRef& pool() const override { return pool_; }

  bool describe_inputs(const Operation& op, RankRecord& own) override {
    // The operation outlives the reading: a peer that reads has not finished it.
    own.inputs_address = reinterpret_cast<uint64_t>(op.inputs.data());
    return !stages_inputs_;
  }
  bool find_inputs(int, const RankRecord& theirs, const Operation& op, PeerInputs& out) override {
    const auto* begins = reinterpret_cast<const std::byte* const*>(theirs.inputs_address);
    out.begins.assign(begins, begins + op.pairs.size());
    return true;
  }

  bool shares_inputs() const override { return true; }
  bool is_dead(int) const override { return false; }
  std::string describe_peer(int) const override { return "a thread of this process"; }
  void leave() noexcept override {}

 private:
  const bool stages_inputs_;
  const PoolRef pool_;
};

int expect_world(int world) {
  BW_EXPECTS(world >= 1, "a world has at least 1 rank, got " + std::to_string(world));
  return world;
}

}  // namespace

LocalWorld::LocalWorld(int world, bool stages_inputs)
    : world_(expect_world(world)),
      stages_inputs_(stages_inputs),
      id_(random_id()),
      memory_(Mapping::anonymous(Control::size_bytes(world))),
      has_joined_(static_cast<size_t>(world)) {}

std::shared_ptr<HostComm> LocalWorld::make_host(int rank, std::string name, std::chrono::nanoseconds timeout) {
  BW_EXPECTS(rank >= 0 && rank < world_,
             "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world_));
  {
    std::lock_guard lock(mutex_);
    BW_EXPECTS(!has_joined_[static_cast<size_t>(rank)], "rank " + std::to_string(rank) + " has joined already");
    has_joined_[static_cast<size_t>(rank)] = true;
  }
  return std::make_shared<HostComm>(HostCommOptions{rank, std::move(name), timeout, id_},
                                    Control(memory_->data(), world_), memory_,
                                    std::make_unique<LocalTransport>(stages_inputs_));
}

CommRef LocalWorld::join(int rank, std::string name, std::chrono::nanoseconds timeout) {
  return make_host(rank, std::move(name), timeout);
}

CommRef LocalWorld::join_cuda(int rank, std::string name, std::chrono::nanoseconds timeout, PoolRef pool) {
  const DeviceId device = pool->device().id();
  BW_EXPECTS(device.kind == DeviceId::Kind::kCuda, "a CUDA communicator needs a pool on a CUDA device");
  std::shared_ptr<LocalCudaBoard> board;
  {
    std::lock_guard lock(mutex_);
    if (board_ == nullptr) {
      board_ = std::make_shared<LocalCudaBoard>(device.index, world_);
    }
    board = board_;
  }
  BW_EXPECTS(board->device_index() == device.index,
             "the ranks of a local world share one CUDA device: cuda:" + std::to_string(board->device_index()) +
                 " is taken, got cuda:" + std::to_string(device.index));
  return std::make_shared<LocalCudaComm>(make_host(rank, std::move(name), timeout), std::move(board), std::move(pool));
}

}  // namespace bucketwheel
