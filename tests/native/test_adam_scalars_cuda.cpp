// kernels/adam_scalars_cuda.cu, run by the emulation: which rows step, which step it is, and with what. Run by
// test_native.py.
// needs: base device kernels fibers adam_scalars_cuda
// runs: address
// slow: address
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_memory.h"
#include "kernels/adam_cuda.h"

using namespace bucketwheel;
using namespace cuda_test;

namespace {

constexpr size_t kParams = 700;
constexpr size_t kRows = 1500;
constexpr uint32_t kGroups = 70;  // two launches

AdamGroup group_of(uint32_t index) {
  const double x = index;
  return {1e-3 * (x + 1), 0.9 - x * 1e-3, 0.999 - x * 1e-4, 1e-8 * x, 0.01 * x};
}

struct State {
  std::vector<AdamCudaRow> rows = std::vector<AdamCudaRow>(kRows);
  std::vector<AdamCudaScalars> scalars = std::vector<AdamCudaScalars>(kRows);
  std::vector<int64_t> steps = std::vector<int64_t>(kParams);
  std::vector<uint8_t> used = std::vector<uint8_t>(kParams);
  std::vector<double> factors = std::vector<double>(kParams);
  float noop = 0.0F;
  std::vector<float> lr = std::vector<float>(kGroups);

  State() {
    for (size_t param = 0; param < kParams; ++param) {
      steps[param] = static_cast<int64_t>(hash(param) % 100'000);
      used[param] = param % 5 != 0;
      factors[param] = 1.0 / static_cast<double>(1 + param % 7);
    }
    for (size_t r = 0; r < kRows; ++r) {
      rows[r].place = static_cast<uint32_t>(hash(r) % kParams);
      rows[r].param = static_cast<uint32_t>(r);  // of no consequence here
      rows[r].group = static_cast<int32_t>(hash(rows[r].place + 1) % kGroups);
      std::memset(static_cast<void*>(&scalars[r]), 0xff, sizeof(AdamCudaScalars));
    }
    for (uint32_t g = 0; g < kGroups; ++g) {
      lr[g] = 0.25F * static_cast<float>(g + 1);
    }
  }

  AdamScalarsLaunch launch(uint32_t first_group, uint32_t last_group, bool counts_steps) {
    AdamScalarsLaunch out;
    out.rows = rows.data();
    out.scalars = scalars.data();
    out.row_count = kRows;
    out.steps = steps.data();
    out.param_count = kParams;
    out.used = used.data();
    out.factors = factors.data();
    out.average = 0.125;
    out.noop = &noop;
    out.counts_steps = counts_steps;
    out.first_group = static_cast<int32_t>(first_group);
    out.group_count = static_cast<int32_t>(last_group - first_group);
    for (uint32_t g = first_group; g < last_group; ++g) {
      out.groups[g - first_group] = group_of(g);
      out.lr[g - first_group] = g % 3 == 0 ? &lr[g] : nullptr;
    }
    return out;
  }
};

bool same_bits(const AdamScalarsOf<double>& a, const AdamScalarsOf<double>& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

}  // namespace

TEST(steps_are_counted_once_and_every_row_gets_the_scalars_of_its_group) {
  in_several_orders([] {
    for (const bool decoupled : {true, false}) {
      State state;
      const std::vector<int64_t> before = state.steps;
      AdamScalarsLaunch first = state.launch(0, 64, true);
      AdamScalarsLaunch second = state.launch(64, kGroups, false);
      first.decoupled = second.decoupled = decoupled;
      first.maximize = second.maximize = !decoupled;
      CHECK(launch_adam_scalars(first, nullptr) == cudaSuccess);
      for (size_t r = 0; r < kRows; ++r) {  // other groups are left as they were
        CHECK((state.scalars[r].is_active == -1) == (state.rows[r].group >= 64));
      }
      CHECK(launch_adam_scalars(second, nullptr) == cudaSuccess);
      for (size_t param = 0; param < kParams; ++param) {
        CHECK(state.steps[param] == before[param] + state.used[param]);
      }
      for (size_t r = 0; r < kRows; ++r) {
        const uint32_t param = state.rows[r].place;
        AdamGroup group = group_of(state.rows[r].group);
        group.lr = state.rows[r].group % 3 == 0 ? state.lr[state.rows[r].group] : group.lr;
        const AdamCudaScalars& got = state.scalars[r];
        CHECK(got.is_active == state.used[param]);
        CHECK(got.step == state.steps[param]);
        CHECK(!got.is_active ||
              same_bits(got.scalars,
                        adam_scalars(group, state.steps[param], state.factors[param] * 0.125, decoupled, !decoupled)));
      }
    }
  });
}

TEST(noop_changes_no_step_and_activates_no_row) {
  for (const float noop : {1.0F, -1e-40F, kNaN, kInfinity}) {
    State state;
    state.noop = noop;
    const std::vector<int64_t> before = state.steps;
    CHECK(launch_adam_scalars(state.launch(0, 64, true), nullptr) == cudaSuccess);
    CHECK(state.steps == before);
    for (size_t r = 0; r < kRows; ++r) {
      CHECK(state.rows[r].group >= 64 || state.scalars[r].is_active == 0);
    }
  }
  State state;
  state.noop = -0.0F;
  CHECK(launch_adam_scalars(state.launch(0, 64, true), nullptr) == cudaSuccess);
  CHECK(state.scalars[0].is_active == (state.rows[0].group < 64 ? state.used[state.rows[0].place] : -1));
  CHECK(state.steps != State().steps);
}

TEST(without_arrays_all_are_used_with_one_factor) {
  State state;
  AdamScalarsLaunch launch = state.launch(0, 64, true);
  launch.used = nullptr;
  launch.factors = nullptr;
  launch.noop = nullptr;
  CHECK(launch_adam_scalars(launch, nullptr) == cudaSuccess);
  for (size_t param = 0; param < kParams; ++param) {
    CHECK(state.steps[param] == State().steps[param] + 1);
  }
  for (size_t r = 0; r < kRows; ++r) {
    CHECK(state.rows[r].group >= 64 || (state.scalars[r].is_active == 1 && state.scalars[r].scalars.gscale == 0.125));
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
