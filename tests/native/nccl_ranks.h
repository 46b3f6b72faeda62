// Ranks that are threads, each with a communicator of the fake NCCL, and streams for their work.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/nccl/api.h"
#include "fake_nccl/fake_nccl.h"

namespace bucketwheel {

// The test itself has NCCL's functions: it is linked with the fake.
inline const NcclApi& api() {
  static const auto* const one = new std::shared_ptr<const NcclApi>(load_nccl("", "the test itself", RTLD_NOW));
  return **one;
}

inline NcclUniqueId new_id() {
  NcclUniqueId id{};
  BW_NCCL_TRY(api(), get_unique_id, &id);
  return id;
}
inline NcclCommRef new_comm(const NcclUniqueId& id, int rank, int world) {
  NcclCommRef comm = nullptr;
  NcclConfig config;
  config.blocking = 1;
  BW_NCCL_TRY(api(), comm_init_rank_config, &comm, world, id, rank, &config);
  return comm;
}

// Runs body(rank, comm) for each rank on a thread of its own; the communicators are destroyed afterwards.
inline void on_ranks(int world, const std::function<void(int, NcclCommRef)>& body) {
  const NcclUniqueId id = new_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const NcclCommRef comm = new_comm(id, rank, world);
      body(rank, comm);
      BW_NCCL_CALL(api(), comm_destroy, comm);  // a body may have ended it
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(fake_nccl_live_comms() == 0 && fake_nccl_open_groups() == 0 && fake_nccl_live_windows() == 0);
}

inline int async_error(NcclCommRef comm) {
  int error = -1;
  BW_NCCL_TRY(api(), comm_get_async_error, comm, &error);
  return error;
}

// What the fake takes for a stream: a thread that runs what it is given, in order.
class Worker {
 public:
  Worker() : thread_([this] { work(); }) {}
  ~Worker() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void synchronize() {
    std::atomic<bool> is_done{false};
    push([&] { is_done = true; });
    sleep_until([&] { return is_done.load(); });
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!task) {
        return;
      }
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

inline int launch(void* stream, void (*function)(void*), void* argument) {
  if (stream == nullptr) {
    function(argument);
  } else {
    static_cast<Worker*>(stream)->push([=] { function(argument); });
  }
  return 0;
}
struct Streams {  // while alive, device work runs in streams
  Streams() { fake_nccl_set_launch(launch, nullptr); }
  ~Streams() {
    fake_nccl_set_launch(nullptr, nullptr);
    fake_nccl_reset();
  }
};

}  // namespace bucketwheel
