#include "comm/run_until.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "device/device_cuda.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::milliseconds kRunSlice{50};

}  // namespace

bool run_until(Deadline deadline, std::function<void()> task, const std::function<void()>& poll) {
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

}  // namespace bucketwheel
