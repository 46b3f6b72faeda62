#include "comm/nccl/session.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/cuda_buffer.h"
#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

// How long abort() waits for a thread that is inside NCCL, before it aborts under that thread's feet.
constexpr std::chrono::seconds kAbortPatience{1};
constexpr std::chrono::microseconds kSessionPoll{100};
constexpr std::chrono::milliseconds kRunSlice{50};

// [Note: warm-up] NCCL connects ranks at the first collective that needs it, algorithm by algorithm, and may hang there
// when a peer has gone. So each communicator runs what it will be used for while it is made, where a deadline is
// watched: small, middling and large, for these take different algorithms. What still connects later does so while the
// watchdog looks, and is aborted when it hangs.
constexpr size_t kSmallShardBytes = 1024;
constexpr size_t kWarmUpBytes[] = {0, size_t{256} << 10, size_t{8} << 20};  // of the full buffer, at least

std::mutex& issue_mutex_of(int device) {
  static auto* const mutexes =
      new std::mutex[CudaDevice::kMaxDevices];  // never freed: aborts run until the process ends
  BW_EXPECTS(device >= 0 && device < CudaDevice::kMaxDevices, "CUDA device " + std::to_string(device));
  return mutexes[device];
}

// Runs `task` in a thread of its own. False when it has not ended at the deadline: it goes on, so it owns what it uses.
// Rethrows what it threw. `poll`, if given, is called meanwhile and may throw, which ends the waiting likewise.
bool run_until(Deadline deadline, std::function<void()> task, const std::function<void()>& poll = {}) {
  struct Run {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_over = false;
    std::exception_ptr error;
  };
  auto run = std::make_shared<Run>();
  std::thread([run, task = std::move(task)]() mutable {
    own_cuda_thread();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;  // what it holds goes before anybody hears of the end
    std::lock_guard lock(run->mutex);
    run->error = std::move(error);
    run->is_over = true;
    run->changed.notify_all();
  }).detach();
  std::unique_lock lock(run->mutex);
  const auto is_over = [&] { return run->is_over; };
  while (!run->changed.wait_until(lock, earlier(deadline, Clock::now() + kRunSlice), is_over)) {
    if (has_passed(deadline)) {
      return false;
    }
    if (poll) {
      lock.unlock();
      poll();
      lock.lock();
    }
  }
  if (run->error) {
    std::rethrow_exception(run->error);
  }
  return true;
}

// The making of a session, which may be given up while it goes on.
class Attempt {
 public:
  // There is a communicator. CommTimeout, and it is aborted, when the attempt has been given up.
  void started(const std::shared_ptr<NcclSession>& session) {
    {
      std::lock_guard lock(mutex_);
      session_ = session;
      if (!is_given_up_) {
        return;
      }
    }
    session->abort();
    throw CommTimeout("given up");
  }
  void give_up() {
    std::lock_guard lock(mutex_);
    is_given_up_ = true;
    if (session_ != nullptr) {
      session_->abort();  // so that it comes back from where it waits
    }
  }
  std::shared_ptr<NcclSession> session() const {
    std::lock_guard lock(mutex_);
    return session_;
  }

 private:
  mutable std::mutex mutex_;
  bool is_given_up_ = false;
  std::shared_ptr<NcclSession> session_;
};

struct Waiting {
  Deadline deadline;
  const std::function<void()>& poll;  // as of run_until()
};

std::shared_ptr<NcclSession> attempt(const Waiting& waiting, const char* what, int device,
                                     std::function<void(Attempt&)> make) {
  auto made = std::make_shared<Attempt>();
  // A text for each thread: what() is shared by copies of an error, in ways that the thread sanitizer does not see.
  const std::string late =
      std::string(what) + " did not finish in time: a rank did not take part, or cannot be reached";
  try {
    std::function<void()> task = [made, late, deadline = waiting.deadline, device, make = std::move(make)] {
      if (has_passed(deadline)) {
        throw CommTimeout(late);  // the thread has run too late: NCCL is not asked for what nobody waits for any more
      }
      CudaGuard guard(device);
      const RelaxedCapture relaxed;  // somebody may be capturing a graph
      make(*made);
    };
    if (run_until(waiting.deadline, std::move(task), waiting.poll)) {
      return made->session();
    }
  } catch (...) {
    made->give_up();
    throw;
  }
  made->give_up();
  throw CommTimeout(late);
}

// The name is that of `settings`.
NcclConfig config_of(const NcclSettings& settings) {
  NcclConfig config = settings.config;
  config.comm_name = settings.name.c_str();
  return config;
}

// Polls: the thread sanitizer does not see the waiting of a std::timed_mutex.
std::unique_lock<std::mutex> try_lock_until(std::mutex& mutex, Clock::time_point deadline) {
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock && Clock::now() < deadline) {
    std::this_thread::sleep_for(kSessionPoll);
    (void)lock.try_lock();
  }
  return lock;
}

}  // namespace

NcclSession::NcclSession(const NcclApi& api, int device, NcclCommRef comm, int rank, int world,
                         std::shared_ptr<const NcclSettings> settings)
    : api_(api),
      device_(device),
      rank_(rank),
      world_(world),
      settings_(std::move(settings)),
      issue_mutex_(issue_mutex_of(device)),
      comm_(comm) {}

std::shared_ptr<NcclSession> NcclSession::make(const NcclApi& api, int device, const NcclUniqueId& id, int rank,
                                               int world, NcclSettings settings, const NcclUses& uses,
                                               Deadline deadline) {
  const auto kept = std::make_shared<const NcclSettings>(std::move(settings));
  const Waiting waiting{deadline, kept->poll};
  return attempt(waiting, "making an NCCL communicator", device, [=, &api](Attempt& attempt) {
    NcclConfig config = config_of(*kept);
    NcclCommRef comm = nullptr;
    const int result = BW_NCCL_CALL(api, comm_init_rank_config, &comm, world, id, rank, &config);
    if (comm == nullptr) {
      expect_success(api, NcclCall::comm_init_rank_config, result);
    }
    // Where the call failed there may be one all the same, to be aborted.
    const std::shared_ptr<NcclSession> made(new NcclSession(api, device, comm, rank, world, kept));
    attempt.started(made);
    expect_success(api, NcclCall::comm_init_rank_config, result);
    made->warm_up(uses);
  });
}

std::shared_ptr<NcclSession> NcclSession::split(int color, int key, NcclSettings settings, const NcclUses& uses,
                                                Deadline deadline) {
  const auto kept = std::make_shared<const NcclSettings>(std::move(settings));
  const Waiting waiting{deadline, kept->poll};
  return attempt(waiting, "splitting an NCCL communicator", device_, [=, self = shared_from_this()](Attempt& attempt) {
    NcclConfig config = config_of(*kept);
    NcclCommRef child = nullptr;
    {
      std::lock_guard lock(self->mutex_);
      if (self->comm() == nullptr) {
        throw CommError("the communicator has ended");
      }
      BW_NCCL_TRY(self->api_, comm_split, self->comm(), color < 0 ? kNcclSplitNoColor : color, key, &child, &config);
    }
    if (child == nullptr) {
      return;
    }
    const std::shared_ptr<NcclSession> made(new NcclSession(self->api_, self->device_, child, 0, 1, kept));
    attempt.started(made);
    BW_NCCL_TRY(self->api_, comm_user_rank, child, &made->rank_);
    BW_NCCL_TRY(self->api_, comm_count, child, &made->world_);
    made->warm_up(uses);
  });
}

std::unique_lock<std::mutex> NcclSession::lock_for(std::chrono::nanoseconds patience) const {
  return try_lock_until(mutex_, Clock::now() + patience);
}

NcclSession::IssueLock NcclSession::lock_to_issue_for(std::chrono::nanoseconds patience) const {
  const Clock::time_point deadline = Clock::now() + patience;
  IssueLock lock{try_lock_until(mutex_, deadline), {}};
  if (lock.comm) {
    lock.device = try_lock_until(issue_mutex_, deadline);
  }
  return lock;
}

std::optional<NcclError> NcclSession::async_error() const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || comm() == nullptr) {
    return {};
  }
  int error = kNcclSuccess;
  if (const int asked = BW_NCCL_CALL(api_, comm_get_async_error, comm(), &error); asked != kNcclSuccess) {
    error = asked;
  }
  if (error == kNcclSuccess || error == kNcclInProgress) {
    return {};
  }
  return nccl_error(api_, NcclCall::comm_get_async_error, error);
}

void NcclSession::run_blocking(const char* what, Deadline deadline, std::function<void()> task,
                               const std::function<void()>& poll) const {
  const bool is_over = run_until(
      deadline,
      [self = shared_from_this(), task = std::move(task)] {
        CudaGuard guard(self->device_);
        const RelaxedCapture relaxed;
        task();
      },
      poll);
  if (!is_over) {
    throw CommTimeout(std::string(what) + " did not finish in time: a rank did not take part, or cannot be reached");
  }
}

void NcclSession::abort() noexcept {
  NcclCommRef const comm = comm_.exchange(nullptr);
  if (comm == nullptr) {
    return;
  }
  try {
    std::thread([self = shared_from_this(), comm] {
      own_cuda_thread();
      // Whoever is inside NCCL with this communicator had better come out first; one that cannot is what the abort is
      // for. Nobody comes in any more, and an abort may take its time: other communicators go on meanwhile.
      (void)self->lock_for(kAbortPatience);
      try {
        CudaGuard guard(self->device_);
        const RelaxedCapture relaxed;
        (void)BW_NCCL_CALL(self->api_, comm_abort, comm);
      } catch (const std::exception&) {  // the driver is gone, and the kernels with it
      }
    }).detach();
  } catch (const std::exception&) {  // no thread to be had: the kernels stay
  }
}

void NcclSession::destroy(Deadline deadline) noexcept {
  NcclCommRef const comm = comm_.exchange(nullptr);
  if (comm == nullptr) {
    return;
  }
  try {
    (void)run_until(deadline, [self = shared_from_this(), comm] {
      (void)self->lock_for(
          kAbortPatience);  // whoever is inside with it, as the watchdog that asks for errors, comes out
      CudaGuard guard(self->device_);
      const RelaxedCapture relaxed;
      if (BW_NCCL_CALL(self->api_, comm_finalize, comm) == kNcclSuccess) {
        (void)BW_NCCL_CALL(self->api_, comm_destroy, comm);
      } else {
        (void)BW_NCCL_CALL(self->api_, comm_abort, comm);
      }
    });
  } catch (const std::exception&) {  // nobody is left who could do anything about it
  }
}

void NcclSession::warm_up(const NcclUses& uses) {
  CudaDevice& device = CudaDevice::at(device_);
  const StreamRef stream = device.new_stream("bw-warm-up");
  CudaBuffer scratch(device);
  try {
    for (const size_t full_bytes : kWarmUpBytes) {
      run_once(uses, full_bytes, scratch, *stream);
    }
  } catch (...) {
    abort();  // what is in the stream waits for peers, and uses the scratch memory
    stream->synchronize();
    throw;
  }
}

void NcclSession::run_once(const NcclUses& uses, size_t full_bytes, CudaBuffer& scratch, Stream& stream) const {
  void* const native = native_stream(stream, "warm-up");
  const auto world = static_cast<size_t>(world_);
  const size_t shard_bytes = std::max(kSmallShardBytes, full_bytes / world / 16 * 16);
  auto* const full = static_cast<std::byte*>(scratch.reserve(world * shard_bytes));
  CudaDevice::at(device_).fill(full, 0, world * shard_bytes, &stream);
  std::byte* const own = full + static_cast<size_t>(rank_) * shard_bytes;
  const size_t count = shard_bytes / sizeof(float);
  std::unique_lock own_lock(mutex_);
  std::unique_lock lock(issue_mutex_);
  if (comm() != nullptr && uses.gathers) {
    BW_NCCL_TRY(api_, all_gather, own, full, count, NcclType::kFloat32, comm(), native);
    BW_NCCL_TRY(api_, broadcast, own, own, count, NcclType::kFloat32, 0, comm(), native);
  }
  if (comm() != nullptr && uses.reduces) {
    BW_NCCL_TRY(api_, reduce_scatter, full, own, count, NcclType::kFloat32, kNcclSum, comm(), native);
    BW_NCCL_TRY(api_, reduce_scatter, full, own, 2 * count, NcclType::kBFloat16, kNcclSum, comm(), native);
  }
  lock.unlock();
  own_lock.unlock();
  stream.synchronize();
}

}  // namespace bucketwheel
