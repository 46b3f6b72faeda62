// device/device_cuda.h: which devices a thread is set to. Run by test_native.py.
// needs: base device
// with: csrc/comm/reaper.cpp csrc/comm/peers/watchdog.cpp
#include "device/device_cuda.h"

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "comm/peers/watchdog.h"
#include "comm/reaper.h"
#include "recorded_cuda.h"

using namespace bucketwheel;
using namespace recorded_cuda;

namespace {

using Devices = std::vector<int>;

// What the calling thread sets while it works on device 2, on 3, and on 3 again.
Devices work_on_two() {
  devices_set.clear();
  for (const int device : {2, 3, 3}) {
    const CudaGuard guard(device);
    const CudaGuard inside(device);
  }
  return devices_set;
}

const Devices kPutBack = {2, 0, 3, 0, 3, 0};
const Devices kNeverBack = {2, 3};

}  // namespace

TEST(a_thread_of_somebody_else_gets_its_device_back) {
  CHECK(work_on_two() == kPutBack);
  devices_set.clear();
  {
    const CudaGuard zero(0);
  }
  CHECK(devices_set.empty());
}

TEST(a_thread_that_is_ours_alone_never_sets_the_device_before) {
  std::thread([] {
    own_cuda_thread();
    CHECK(work_on_two() == kNeverBack);
  }).join();
}

TEST(the_watchdog_and_the_reaper_are_threads_of_ours) {
  Devices seen;
  std::atomic<bool> is_over{false};
  const std::function<void()> work = [&] {
    if (!is_over) {
      seen = work_on_two();
      is_over = true;
    }
  };
  const auto watching = watch(work);
  sleep_until([&] { return is_over.load(); });
  watching->stop();
  CHECK(seen == kNeverBack);

  is_over = false;
  Handle::Keepalive last(nullptr, [&](void*) { work(); });
  std::vector<Handle::Keepalive> all;
  all.push_back(std::move(last));
  free_later(std::move(all));
  sleep_until([&] { return is_over.load(); });
  stop_freeing();
  CHECK(seen == kNeverBack);
}

TEST(a_stream_of_another_device_is_refused) {
  int memory = 0;  // some address
  const StreamRef stream = CudaDevice::at(3).borrow(&memory);
  expect_on_device(*stream, 3, "the operation");
  CHECK_THROWS(ValueError, "the operation: the stream is of cuda:3, the communicator of cuda:2",
               expect_on_device(*stream, 2, "the operation"));
  CHECK_THROWS(ValueError, "not a CUDA stream", expect_on_device(*cpu_device().new_stream("host"), 2, "the operation"));
}

int main(int argc, char** argv) {
  install();
  return run_tests(argc, argv);
}
