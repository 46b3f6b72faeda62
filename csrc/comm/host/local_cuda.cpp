#include "comm/host/local_cuda.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "comm/peers/patience.h"
#include "device/device_cuda.h"
#include "kernels/pack_cuda.h"

namespace bucketwheel {
namespace {

std::byte* part_of(const View& full, int rank, size_t shard_bytes) {
  return static_cast<std::byte*>(full.data) + static_cast<size_t>(rank) * shard_bytes;
}

}  // namespace

// ---- the board

LocalCudaBoard::~LocalCudaBoard() {
  try {
    (void)take_finished();
    if (!running_.empty()) {
      stream_->synchronize();  // before what the device reads and writes is freed
    }
  } catch (const std::exception&) {  // the driver is gone: nothing runs any more
  }
}

StreamRef LocalCudaBoard::stream() const {
  std::lock_guard lock(mutex_);
  return stream_;
}

bool LocalCudaBoard::has_arrived(int rank, uint64_t seq) const {
  std::lock_guard lock(mutex_);
  const auto found = meetings_.find(seq);
  return found == meetings_.end() || found->second[static_cast<size_t>(rank)] != nullptr;
}

std::vector<LocalCudaBoard::Finished> LocalCudaBoard::take_finished() {
  std::vector<Finished> finished;
  while (!running_.empty() && running_.front().done != nullptr && running_.front().done->query()) {
    finished.push_back(std::move(running_.front()));
    running_.pop_front();
    if (const auto host = finished.back().host.lock()) {
      host->flight().finished(finished.back().seq, true);
    }
  }
  return finished;
}

void LocalCudaBoard::leave(int rank) {
  std::vector<std::unique_ptr<Arrival>> forgotten;
  std::vector<Finished> finished;
  std::lock_guard lock(mutex_);
  forgotten.reserve(meetings_.size());
  for (auto& [seq, meeting] : meetings_) {
    forgotten.push_back(std::move(meeting[static_cast<size_t>(rank)]));
  }
  try {
    finished = take_finished();
  } catch (const Error&) {  // the device is in trouble: its memory stays until the world ends
  }
}

void LocalCudaBoard::arrive(int rank, Arrival arrival) {
  // Before the lock, so destroyed after it.
  std::vector<Finished> finished;
  Meeting complete;
  std::lock_guard lock(mutex_);
  if (stream_ == nullptr) {
    stream_ = CudaDevice::at(device_index_).new_stream("bw-local");
  }
  finished = take_finished();
  const uint64_t seq = arrival.op->seq;
  Meeting& meeting = meetings_.try_emplace(seq).first->second;
  meeting.resize(static_cast<size_t>(world_));
  meeting[static_cast<size_t>(rank)] = std::make_unique<Arrival>(std::move(arrival));
  if (std::ranges::any_of(meeting, [](const auto& one) { return one == nullptr; })) {
    return;
  }
  complete = std::move(meeting);
  meetings_.erase(seq);
  launch(complete);
}

void LocalCudaBoard::launch(Meeting& meeting) {
  const uint64_t seq = meeting.front()->op->seq;
  EventRef done;
  std::unique_ptr<Failure> failure;
  try {
    enqueue(meeting);
    const bool is_timed = std::ranges::any_of(meeting, [](const auto& one) { return one->timing; });
    // Out: whoever uses inputs or outputs next waits for this, on every rank.
    done = stream_->record(is_timed);
  } catch (const Failure& error) {
    failure = std::make_unique<Failure>(error);
  } catch (const std::exception& error) {
    failure = std::make_unique<Failure>(failure_of(error, -1, seq));
  }
  if (failure != nullptr) {
    try {
      done = stream_->record();  // part of it may run
    } catch (const Error&) {     // the device is in trouble: what it uses stays until the world ends
    }
  }
  for (const auto& one : meeting) {
    one->keepalive.push_back(std::const_pointer_cast<Operation>(one->op));  // and its sink
    running_.push_back({done, std::move(one->keepalive), one->host, seq});
    if (failure == nullptr) {
      one->host->flight().started(seq);
      one->done->resolve(done);
    } else {
      running_.back().host.reset();
      one->host->flight().finished(seq, false);
      one->done->fail(one->host->fail(*failure, {seq, name_of(one->op->collective), ""}));
    }
  }
}

void LocalCudaBoard::enqueue(const Meeting& meeting) {
  const Operation& first = *meeting.front()->op;
  const auto differs = [&](const auto& one) { return one->op->signature != first.signature; };
  if (std::ranges::any_of(meeting, differs)) {
    std::vector<std::string> calls;
    for (const auto& one : meeting) {
      calls.push_back(text_of(one->op->description()));
    }
    throw Failure{FailureKind::kMismatch, mismatch_text(calls), -1, first.seq};
  }
  CudaGuard guard(device_index_);
  for (const auto& one : meeting) {
    // In: the inputs are complete and the outputs free. Without it the device reads gradients that are not there yet.
    stream_->wait(one->ready);
    for (const EventRef& event : one->after) {
      stream_->wait(event);
    }
  }
  switch (first.collective) {
    case Collective::kAllGather:
      return launch_all_gather(meeting);
    case Collective::kReduceScatter:
      return launch_reduce_scatter(meeting);
    case Collective::kBroadcast:
      return launch_broadcast(meeting);
  }
}

void LocalCudaBoard::launch_all_gather(const Meeting& meeting) {
  void* const native = native_stream(*stream_, "all_gather");
  for (size_t i = 0; i < meeting.front()->op->pairs.size(); ++i) {
    const size_t bytes = meeting.front()->op->pairs[i].shard.size_bytes();
    for (const auto& to : meeting) {
      for (int r = 0; r < world_ && bytes != 0; ++r) {
        const void* from = meeting[static_cast<size_t>(r)]->op->pairs[i].shard.data;
        std::byte* const part = part_of(to->op->pairs[i].full, r, bytes);
        if (part != from) {  // in place
          BW_CUDA_TRY(memcpy_async, part, from, bytes, native);
        }
      }
      const View& full = to->op->pairs[i].full;
      const void* const gathered = full.data;
      if (to->op->sink && full.numel != 0) {
        to->op->sink->enqueue(i, {&gathered, 1}, full.dtype, full.numel, *stream_);
      }
    }
  }
}

void LocalCudaBoard::launch_broadcast(const Meeting& meeting) {
  const Operation& first = *meeting.front()->op;
  const View& from = meeting[static_cast<size_t>(first.root)]->op->pairs.front().full;
  for (const auto& to : meeting) {
    void* const data = to->op->pairs.front().full.data;
    if (data != from.data && from.numel != 0) {
      BW_CUDA_TRY(memcpy_async, data, from.data, from.size_bytes(), native_stream(*stream_, "broadcast"));
    }
  }
}

void LocalCudaBoard::launch_reduce_scatter(const Meeting& meeting) {
  void* const native = native_stream(*stream_, "reduce_scatter");
  const int max_blocks = CudaDevice::at(device_index_).fill_blocks(kCudaBlockThreads);
  for (size_t i = 0; i < meeting.front()->op->pairs.size(); ++i) {
    for (int r = 0; r < world_; ++r) {
      const Operation& op = *meeting[static_cast<size_t>(r)]->op;
      const View& shard = op.pairs[i].shard;
      if (shard.numel == 0) {
        continue;
      }
      ReduceLaunch launch;
      for (int source = 0; source < world_; ++source) {
        launch.sources[source] =
            part_of(meeting[static_cast<size_t>(source)]->op->pairs[i].full, r, shard.size_bytes());
      }
      if (op.sink) {
        op.sink->enqueue(i, {launch.sources, static_cast<size_t>(world_)}, shard.dtype, shard.numel, *stream_);
        continue;
      }
      launch.to = shard.data;
      launch.world = world_;
      launch.dtype = shard.dtype;
      launch.numel = shard.numel;
      launch.divisor = op.reduction.op == ReduceOp::kAvg ? world_ : 1.0;
      launch.factor = op.reduction.op == ReduceOp::kPreMul ? op.reduction.factor : 1.0;
      launch.max_blocks = max_blocks;
      BW_CUDA_TRY(launch_reduce, launch, native);
    }
  }
}

// ---- the communicator

LocalCudaComm::LocalCudaComm(std::shared_ptr<HostComm> host, std::shared_ptr<LocalCudaBoard> board, PoolRef pool)
    : host_(std::move(host)),
      who_(std::make_shared<const std::string>(host_->health().who())),
      board_(std::move(board)),
      pool_(std::move(pool)) {
  BW_EXPECTS(host_->world() <= ReduceLaunch::kMaxWorld, std::to_string(host_->world()) + " ranks: at most " +
                                                            std::to_string(ReduceLaunch::kMaxWorld) +
                                                            " are supported on one device");
}

LocalCudaComm::~LocalCudaComm() {
  try {
    close(Clock::now() + kPatience.destructor);
  } catch (const std::exception&) {  // a destructor tells nobody; the peers see a rank that left
  }
}

HandleRef LocalCudaComm::issue(std::shared_ptr<Operation> op, IssueOptions options) {
  BW_EXPECTS(options.stream == nullptr,
             "the local backend on CUDA has one stream for all ranks: stream= is not supported");
  BW_EXPECTS(options.caller != nullptr, "an operation on CUDA needs the caller's stream");
  if (is_capturing(*options.caller)) {
    throw CaptureError(
        "the local backend cannot be captured in a CUDA graph: the rank that calls last enqueues an "
        "operation");
  }
  for (const EventRef& event : options.after) {
    if (const auto* deferred = dynamic_cast<const DeferredEvent*>(event.get())) {
      deferred->await();  // of another communicator, whose ranks issue it without us
    }
  }
  std::lock_guard lock(issue_mutex_);
  const uint64_t seq = seq_ + 1;
  const FailedAt at{seq, name_of(op->collective), ""};
  host_->expect_usable();
  if (const auto failure = host_->trouble(seq, [](int) { return false; }, "the operation")) {
    std::rethrow_exception(host_->fail(*failure, at));  // one that has failed will not come
  }
  op->seq = seq;
  const Deadline deadline = host_->timeout_from_now();
  // Called by threads that wait for the peers to issue.
  auto poll = [host = host_, board = board_, seq, at, deadline] {
    const std::string what = "operation " + std::to_string(seq);
    const auto is_missing = [&](int r) { return !board->has_arrived(r, seq); };
    host->expect_usable();
    if (const auto failure = host->trouble(seq, is_missing, what.c_str())) {
      std::rethrow_exception(host->fail(*failure, at));
    }
    if (has_passed(deadline)) {
      std::string text = "timeout in " + what + ". Not arrived:";
      for (int r = 0; r < host->world(); ++r) {
        text += is_missing(r) ? " rank " + std::to_string(r) : "";
      }
      std::rethrow_exception(host->fail({FailureKind::kTimeout, std::move(text), -1, seq}, at));
    }
  };
  auto done = std::make_shared<DeferredEvent>(std::move(poll));
  auto state = std::make_shared<Handle::State>();
  state->seq = seq;
  state->op = name_of(op->collective);
  state->who = who_;
  state->size_bytes = op->size_bytes;
  state->device = device();
  state->done = done;
  host_->flight().issued(*op, Clock::now());
  host_->health().set_last_seq(seq);
  board_->arrive(rank(), {std::move(op), options.caller->record(), std::move(options.after), options.timing, done,
                          std::move(options.keepalive), host_});
  host_->note_issued(0, seq);
  seq_ = seq;
  last_done_ = std::move(done);
  return std::make_shared<Handle>(std::move(state));
}

void LocalCudaComm::close(Deadline deadline) {
  std::shared_ptr<DeferredEvent> last;
  uint64_t seq = 0;
  {
    std::lock_guard lock(issue_mutex_);
    last = std::exchange(last_done_, nullptr);
    seq = seq_;
  }
  if (last != nullptr) {
    try {
      if (!last->synchronize(deadline)) {
        last->fail(host_->fail({FailureKind::kClosed, "closed while operations were in flight"}, {.seq = seq}));
      }
    } catch (const Error&) {  // how the operation ended is its handle's to say
    }
  }
  host_->close(deadline);
  board_->leave(rank());
}

}  // namespace bucketwheel
