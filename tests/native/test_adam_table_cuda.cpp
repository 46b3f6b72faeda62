// kernels/adam_table_cuda.h: the order of its uses, and which rows are aligned. Run by test_native.py.
// needs: base device kernels
// slow: thread
#include "kernels/adam_table_cuda.h"

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "recorded_cuda.h"

using namespace bucketwheel;
using namespace recorded_cuda;

namespace {

constexpr auto F32 = DType::kFloat32;
constexpr auto BF16 = DType::kBFloat16;
constexpr auto F16 = DType::kFloat16;
constexpr auto F64 = DType::kFloat64;
constexpr int64_t kNumel = 64;

using Actions = std::vector<std::string>;

alignas(16) std::byte memory[8][kNumel * 8];
int64_t steps[1] = {0};
const AdamGroup kGroup = {1e-3, 0.9, 0.999, 1e-8, 0.0};

// Every array at a multiple of 16 bytes.
AdamRow row_of(DType p, DType state, AdamWeight weight, int64_t param_begin) {
  AdamRow row;
  row.p = memory[0];
  row.g = memory[1];
  row.m = memory[2];
  row.v = memory[3];
  row.master = weight == AdamWeight::kParam ? nullptr : memory[4];
  row.weight = weight;
  row.p_dtype = row.g_dtype = p;
  row.state_dtype = state;
  row.numel = kNumel;
  row.param_begin = param_begin;
  return row;
}

AdamCudaStep step_of_one() {
  AdamCudaStep step;
  step.groups = {&kGroup, 1};
  step.steps = steps;
  step.param_count = 1;
  return step;
}

uint8_t head_of(const AdamRow& row) {
  AdamCudaTable table(CudaDevice::at(0));
  const StreamRef stream = stream_named('A');
  table.add(row);
  table.begin(step_of_one(), *stream);
  table.step(0, 1, *stream);
  take_actions();
  return last_adam.rows[0].head;
}

}  // namespace

TEST(a_step_that_fails_is_waited_for_too) {
  AdamCudaTable table(CudaDevice::at(0));
  table.add(row_of(F32, F32, AdamWeight::kParam, 0));
  const StreamRef a = stream_named('A'), b = stream_named('B'), c = stream_named('C');
  table.begin(step_of_one(), *a);
  table.step(0, 1, *a);
  take_actions();

  table.set_grad(0, memory[5], F32);  // to be uploaded
  plan_cuda_fault({CudaCall::launch_adam_scalars, 1, 719, 0});
  CHECK_THROWS(DeviceError, "launch_adam_scalars", table.begin(step_of_one(), *b));
  CHECK(take_actions() == Actions({"B: wait for A", "B: upload"}));
  table.begin(step_of_one(), *c);
  CHECK(take_actions() == Actions({"C: wait for B", "C: launch_adam_scalars"}));

  plan_cuda_fault({CudaCall::launch_adam, 1, 719, 0});
  CHECK_THROWS(DeviceError, "launch_adam", table.step(0, 1, *b));
  table.step(0, 1, *a);
  CHECK(take_actions() == Actions({"B: wait for C", "A: wait for B", "A: launch_adam"}));
}

// Where nothing is rounded stochastically, a row may begin anywhere in its parameter.
TEST(only_rows_with_random_bits_start_at_their_blocks) {
  for (const int64_t begin : {0, 3, 8, 13}) {
    const auto in_blocks = static_cast<uint8_t>(begin % 8 == 0 ? 0 : AdamCudaRow::kUnaligned);
    CHECK(head_of(row_of(F32, F32, AdamWeight::kParam, begin)) == 0);
    CHECK(head_of(row_of(F16, F32, AdamWeight::kParam, begin)) == 0);
    CHECK(head_of(row_of(F64, F64, AdamWeight::kParam, begin)) == 0);
    CHECK(head_of(row_of(BF16, F32, AdamWeight::kMaster, begin)) == 0);
    CHECK(head_of(row_of(BF16, F32, AdamWeight::kRemainder, begin)) == 0);
    CHECK(head_of(row_of(BF16, F32, AdamWeight::kParam, begin)) == 0);
    CHECK(head_of(row_of(F32, BF16, AdamWeight::kParam, begin)) == in_blocks);
    CHECK(head_of(row_of(BF16, BF16, AdamWeight::kMaster, begin)) == in_blocks);
  }
}

TEST(a_head_brings_all_arrays_to_alignment) {
  AdamRow row = row_of(F32, F32, AdamWeight::kParam, 5);
  row.numel = kNumel - 8;
  for (const void** array :
       {const_cast<const void**>(&row.p), &row.g, const_cast<const void**>(&row.m), const_cast<const void**>(&row.v)}) {
    *array = static_cast<const float*>(*array) + 1;
  }
  CHECK(head_of(row) == 3);
  row.g = static_cast<const float*>(row.g) + 1;
  CHECK(head_of(row) == AdamCudaRow::kUnaligned);
}

int main(int argc, char** argv) {
  install();
  return run_tests(argc, argv);
}
