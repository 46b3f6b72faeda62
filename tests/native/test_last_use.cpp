// device/last_use.h: who waits for whom. Run by test_native.py.
// needs: base device
#include "device/last_use.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "device/device.h"
#include "recorded_cuda.h"

using namespace bucketwheel;
using namespace recorded_cuda;

namespace {

using Actions = std::vector<std::string>;

void use(LastUse& last_use, char stream) {
  const StreamRef ref = stream_named(stream);
  last_use.in(*ref, "test", [](void* native, bool is_captured) { note(native, is_captured ? "captured" : "use"); });
}

}  // namespace

TEST(a_use_waits_for_the_last_one_where_that_was_in_another_stream) {
  LastUse last_use;
  for (const char stream : {'A', 'A', 'B', 'A'}) {
    use(last_use, stream);
  }
  CHECK(take_actions() == Actions({"A: use", "A: use", "B: wait for A", "B: use", "A: wait for B", "A: use"}));
}

TEST(a_use_that_fails_halfway_is_the_last_one_too) {
  LastUse last_use;
  use(last_use, 'A');
  const StreamRef second = stream_named('B');
  CHECK_THROWS(std::runtime_error, "halfway", last_use.in(*second, "test", [](void* native, bool) {
    note(native, "half a use");
    throw std::runtime_error("halfway");
  }));
  use(last_use, 'C');
  CHECK(take_actions() == Actions({"A: use", "B: wait for A", "B: half a use", "C: wait for B", "C: use"}));
}

TEST(the_first_error_is_the_one_that_is_told) {
  LastUse last_use;
  const StreamRef stream = stream_named('A');
  plan_cuda_fault({CudaCall::event_record, 1, 719, 0});
  CHECK_THROWS(std::runtime_error, "halfway",
               last_use.in(*stream, "test", [](void*, bool) { throw std::runtime_error("halfway"); }));
  plan_cuda_fault({CudaCall::event_record, 1, 719, 0});
  CHECK_THROWS(DeviceError, "event_record", use(last_use, 'A'));
  clear_cuda_faults();
  take_actions();
}

TEST(nothing_waits_for_a_captured_use_nor_that_for_anything) {
  LastUse last_use;
  use(last_use, 'A');
  captured = reinterpret_cast<void*>(static_cast<uintptr_t>('B'));
  use(last_use, 'B');
  captured = nullptr;
  use(last_use, 'C');
  CHECK(take_actions() == Actions({"A: use", "B: captured", "C: use"}));
}

TEST(streams_of_the_cpu_are_refused) {
  LastUse last_use;
  const StreamRef stream = cpu_device().new_stream("cpu");
  CHECK_THROWS(ValueError, "test: the stream is not a CUDA stream", last_use.in(*stream, "test", [](void*, bool) {}));
}

int main(int argc, char** argv) {
  install();
  return run_tests(argc, argv);
}
