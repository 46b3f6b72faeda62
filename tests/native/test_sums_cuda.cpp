// kernels/sums_cuda.h: the order of uses, and what is uploaded and allocated when. Run by test_native.py.
// needs: base device kernels
#include "kernels/sums_cuda.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "recorded_cuda.h"

using namespace bucketwheel;
using namespace recorded_cuda;

namespace {

using Actions = std::vector<std::string>;

float values[64];
double sums[8];

}  // namespace

TEST(sums_that_fail_are_waited_for_too) {
  SumsqCudaTable table(CudaDevice::at(0));
  const NormRow row = {values, 64, DType::kFloat32};
  const StreamRef a = stream_named('A'), b = stream_named('B'), c = stream_named('C');
  table.run({&row, 1}, sums, nullptr, *a);
  CHECK(take_actions() == Actions({"A: upload", "A: upload", "A: launch_sumsq", "A: launch_fold"}));
  plan_cuda_fault({CudaCall::launch_fold, 1, 719, 0});
  CHECK_THROWS(DeviceError, "launch_fold", table.run({&row, 1}, sums, nullptr, *b));
  CHECK(take_actions() == Actions({"B: wait for A", "B: launch_sumsq"}));
  table.run({&row, 1}, sums, nullptr, *c);
  CHECK(take_actions() == Actions({"C: wait for B", "C: launch_sumsq", "C: launch_fold"}));
}

// A graph's uploads happen in its replays, which may never come. Nothing waits for what is captured, nor that for
// anything.
TEST(a_graph_and_what_is_outside_leave_each_other_alone) {
  ShardAccumulatorCuda shard(CudaDevice::at(0), values, DType::kFloat32, 64, {{0, 64}}, sums);
  const void* source = values;
  const StreamRef a = stream_named('A'), b = stream_named('B');
  captured = native_stream(*a, "test");
  shard.run({&source, 1}, DType::kFloat32, 64, *a);
  CHECK(take_actions() == Actions({"A: upload", "A: upload", "A: launch_accumulate", "A: launch_fold"}));
  shard.run({&source, 1}, DType::kFloat32, 64, *b);
  CHECK(take_actions() == Actions({"B: upload", "B: upload", "B: launch_accumulate", "B: launch_fold"}));
  shard.run({&source, 1}, DType::kFloat32, 64, *a);
  CHECK(take_actions() == Actions({"A: launch_accumulate", "A: launch_fold"}));
  captured = nullptr;
  shard.run({&source, 1}, DType::kFloat32, 64, *b);
  CHECK(take_actions() == Actions({"B: launch_accumulate", "B: launch_fold"}));
}

int main(int argc, char** argv) {
  install();
  return run_tests(argc, argv);
}
