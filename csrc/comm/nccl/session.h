// NcclSession: one ncclComm_t, from its making under a deadline to its end.
//
// [Note: blocking calls] Communicators are blocking ones: a call of NCCL returns when it has ended. Calls that wait for
// peers (making, splitting, registering, ending) run in a thread of their own, which the caller leaves behind at its
// deadline. An operation runs in the caller's thread: the watchdog sees its deadline, and abort() makes it return.
// Non-blocking communicators (ncclConfig_t::blocking = 0) would have each call polled until it has ended.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/fork.h"
#include "comm/nccl/api.h"
#include "device/stream.h"

namespace bucketwheel {

struct NcclSettings {
  NcclConfig config;                // without the name
  std::string name;                 // in NCCL's own log
  std::function<void()> poll = {};  // called while make() and split() wait; what it throws ends that
};

// Which collectives a communicator connects for when it is made ([Note: warm-up], nccl_session.cpp).
struct NcclUses {
  bool gathers = true;
  bool reduces = true;
};

class CudaBuffer;

class NcclSession : public std::enable_shared_from_this<NcclSession> {
 public:
  // Collective. The first waits for all ranks of the world, the second for all of this session's: those with
  // `color` < 0 take part and get null. NcclError when NCCL refuses; CommTimeout at the deadline, or what the
  // settings' poll throws, after which the attempt goes on in the background and is undone should it succeed.
  static std::shared_ptr<NcclSession> make(const NcclApi& api, int device, const NcclUniqueId& id, int rank, int world,
                                           NcclSettings settings, const NcclUses& uses, Deadline deadline);
  std::shared_ptr<NcclSession> split(int color, int key, NcclSettings settings, const NcclUses& uses,
                                     Deadline deadline);

  const NcclApi& api() const { return api_; }
  int device() const { return device_; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  bool is_forked() const { return process_.is_foreign(); }  // it is the parent process's, and nobody here may touch it

  // Whoever calls NCCL with a communicator holds its mutex, and who issues operations the device's as well, for those
  // are to be issued by one thread at a time per device, in one order. What waits for peers and issues nothing, as
  // split(), holds the first alone: other communicators go on, whose operations the peers may need first.
  std::mutex& mutex() const { return mutex_; }
  struct IssueLock {
    std::unique_lock<std::mutex> comm;  // taken first
    std::unique_lock<std::mutex> device;
    explicit operator bool() const { return device.owns_lock(); }
  };
  // The locks, not held if they could not be had for so long: somebody may be stuck inside NCCL.
  IssueLock lock_to_issue_for(std::chrono::nanoseconds patience) const;
  std::unique_lock<std::mutex> lock_for(std::chrono::nanoseconds patience) const;  // mutex()'s
  // With the mutex held, while it is used; null after abort() and destroy().
  NcclCommRef comm() const { return comm_; }
  // What went wrong in the background: "6 remote process exited...", nothing while all is well or when NCCL is busy.
  std::optional<NcclError> async_error() const;

  // Runs a `task` that may block inside NCCL in a thread of its own, on the session's device. CommTimeout at the deadline,
  // or what `poll` throws, which is called meanwhile: the task then goes on, so it owns what it uses.
  void run_blocking(const char* what, Deadline deadline, std::function<void()> task,
                    const std::function<void()>& poll) const;

  // Ends the kernels that wait for peers. In the background; the first call of the two counts.
  void abort() noexcept;
  // Orderly end, all operations being over. Ranks of one host wait for each other in it: after the deadline it goes on
  // in the background.
  void destroy(Deadline deadline) noexcept;

 private:
  NcclSession(const NcclApi& api, int device, NcclCommRef comm, int rank, int world,
              std::shared_ptr<const NcclSettings> settings);
  void warm_up(const NcclUses& uses);
  void run_once(const NcclUses& uses, size_t full_bytes, CudaBuffer& scratch, Stream& stream) const;

  const NcclApi& api_;
  const int device_;
  int rank_;  // known once split() has ended, like the next
  int world_;
  const std::shared_ptr<const NcclSettings> settings_;  // NCCL may read its strings
  mutable std::mutex mutex_;
  std::mutex& issue_mutex_;  // of the device
  const MadeIn process_;
  std::atomic<NcclCommRef> comm_;
};

}  // namespace bucketwheel
