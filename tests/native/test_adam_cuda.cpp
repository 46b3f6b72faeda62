// kernels/adam_cuda.cu: the source that nvcc compiles, run by the emulation, against the CPU's kernels, which
// tests/unit/test_adam_matrix.py compares with a slow version. Run by test_native.py.
// needs: base device kernels fibers adam_cuda
// runs: address
// slow: address
#include "kernels/adam_cuda.h"

#include <array>
#include <cstdint>
#include <vector>

#include "cuda_memory.h"
#include "kernels/adam.h"

using namespace bucketwheel;
using namespace cuda_test;

namespace {

constexpr auto F32 = DType::kFloat32;
constexpr auto BF16 = DType::kBFloat16;
constexpr auto F16 = DType::kFloat16;
constexpr auto F64 = DType::kFloat64;

constexpr AdamGroup kGroup = {1e-2, 0.9, 0.99, 1e-8, 0.1};
constexpr double kFactor = 0.5;

std::vector<AdamVariant> all_variants() {
  std::vector<AdamVariant> all;
  for (const bool amsgrad : {false, true}) {
    all.push_back({F64, F64, AdamWeight::kParam, amsgrad});
    for (const DType state : {F32, BF16}) {
      all.push_back({F32, state, AdamWeight::kParam, amsgrad});
      all.push_back({BF16, state, AdamWeight::kParam, amsgrad});
      all.push_back({F16, state, AdamWeight::kParam, amsgrad});
      all.push_back({BF16, state, AdamWeight::kMaster, amsgrad});
      all.push_back({F16, state, AdamWeight::kMaster, amsgrad});
      all.push_back({BF16, state, AdamWeight::kRemainder, amsgrad});
    }
  }
  return all;
}

// A row with memory of its own. `head`: as in AdamCudaRow; `shift` (for kUnaligned): elements between 16-byte
// alignment and the arrays, another number for each.
struct Row {
  Array p, g, m, v, vmax, master;
  AdamCudaRow row{};
  AdamCudaScalars scalars{};

  Row(const AdamVariant& variant, DType g_dtype, int64_t numel, uint8_t head, uint64_t key) {
    size_t place = 0;
    const auto array = [&](DType dtype, bool is_there) {
      if (!is_there) {
        return Array();
      }
      const size_t shift = head == AdamCudaRow::kUnaligned ? 1 + (key + place++) % 7 : 1024 - head;
      return Array(dtype, numel, shift * size_of(dtype) % 16);
    };
    p = array(variant.p_dtype, true);
    g = array(g_dtype, true);
    m = array(variant.state_dtype, true);
    v = array(variant.state_dtype, true);
    vmax = array(variant.state_dtype, variant.amsgrad);
    master =
        array(variant.weight == AdamWeight::kRemainder ? DType::kInt16 : F32, variant.weight != AdamWeight::kParam);
    p.fill(key, true);
    g.fill(key + 1);
    m.fill(key + 2, true);
    v.fill(key + 3, true);
    for (int64_t i = 0; i < numel; ++i) {
      v.set(i, std::abs(v.get(i)));
      if (variant.amsgrad) {
        vmax.set(i, std::abs(some_value(key + 4 + static_cast<uint64_t>(i))));
      }
      if (variant.weight == AdamWeight::kMaster) {
        master.set(i, some_value(key + 5 + static_cast<uint64_t>(i), true));
        if (i / 64 % 2 == 0) {  // the others were written to
          p.set(i, master.get(i));
        }
      } else if (variant.weight == AdamWeight::kRemainder) {
        master.at<uint16_t>(i) = static_cast<uint16_t>(hash(key + 6 + static_cast<uint64_t>(i)));
      }
    }
    row.numel = numel;
    row.param = static_cast<uint32_t>(key % 1000);
    const int64_t begin = 8 * (static_cast<int64_t>(key % 5) << 31);  // of the parameter: beyond 2^32 for some
    row.param_begin = head == AdamCudaRow::kUnaligned ? begin + 3 : begin + 1024 - head;
    row.g_dtype = g_dtype;
    row.head = head;
    scalars.is_active = 1;
    scalars.step = 1 + static_cast<int64_t>(key % 3);
    take_scalars(true);
    point();
  }
  Row(const Row& other)
      : p(other.p),
        g(other.g),
        m(other.m),
        v(other.v),
        vmax(other.vmax),
        master(other.master),
        row(other.row),
        scalars(other.scalars) {
    point();
  }

  void take_scalars(bool decoupled) { scalars.scalars = adam_scalars(kGroup, scalars.step, kFactor, decoupled, false); }

  void point() {
    row.p = p.data();
    row.g = g.data();
    row.m = m.data();
    row.v = v.data();
    row.vmax = vmax.data();
    row.master = master.data();
  }

  bool equals(const Row& other) const {
    return p.equals(other.p) && g.equals(other.g) && m.equals(other.m) && v.equals(other.v) &&
           (vmax.data() == nullptr || vmax.equals(other.vmax)) &&
           (master.data() == nullptr || master.equals(other.master));
  }
};

// A table, and launches over its rows [first, last).
struct Table {
  std::vector<Row> rows;
  std::vector<AdamCudaRow> device_rows;
  std::vector<AdamCudaScalars> scalars;
  std::vector<int64_t> first_chunk;

  explicit Table(std::vector<Row> rows_in) : rows(std::move(rows_in)) {
    std::vector<int64_t> sizes;
    for (const Row& row : rows) {
      sizes.push_back(row.row.numel);
      device_rows.push_back(row.row);
      scalars.push_back(row.scalars);
    }
    first_chunk = chunk_starts(sizes, kAdamCudaChunkNumel);
  }

  AdamLaunch launch(const AdamVariant& variant, size_t first, size_t last, int max_blocks) const {
    AdamLaunch out;
    out.variant = variant;
    out.rows = device_rows.data();
    out.first_chunk = first_chunk.data();
    out.scalars = scalars.data();
    out.first_row = static_cast<int64_t>(first);
    out.last_row = static_cast<int64_t>(last);
    out.chunks = first_chunk[last] - first_chunk[first];
    out.seed = 0x0123456789abcdefu;
    out.max_blocks = max_blocks;
    return out;
  }
};

// The launch leaves what the CPU's kernels make of the rows; those outside of it stay.
void expect_cpu_steps(const AdamLaunch& launch, const Table& table, std::vector<Row> rows) {
  AdamTable cpu;
  AdamStep step;
  std::vector<int64_t> steps;
  std::vector<uint8_t> used;
  for (const Row& row : rows) {
    AdamRow to;
    to.p = row.row.p;
    to.g = row.row.g;
    to.m = row.row.m;
    to.v = row.row.v;
    to.vmax = row.row.vmax;
    to.master = row.row.master;
    to.numel = row.row.numel;
    to.param_begin = row.row.param_begin;
    to.param = row.row.param;
    to.p_dtype = launch.variant.p_dtype;
    to.g_dtype = row.row.g_dtype;
    to.state_dtype = launch.variant.state_dtype;
    to.weight = launch.variant.weight;
    cpu.add(to);
    steps.push_back(row.scalars.step);
    used.push_back(static_cast<uint8_t>(row.scalars.is_active));
  }
  step.groups = {&kGroup, 1};
  step.steps = steps;
  step.used = used;
  step.gscale = {&kFactor, 1};
  step.first_row = launch.first_row;
  step.last_row = launch.last_row;
  step.decoupled = launch.decoupled;
  step.stochastic = launch.stochastic;
  step.resync = launch.resync;
  step.seed = launch.seed;
  cpu.step(step);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (!table.rows[r].equals(rows[r])) {
      std::fprintf(stderr, "row %zu of %zu, %lld elements, head %d, p %s, g %s, state %s, weight %d, amsgrad %d\n", r,
                   rows.size(), static_cast<long long>(rows[r].row.numel), rows[r].row.head,
                   name_of(launch.variant.p_dtype), name_of(rows[r].row.g_dtype), name_of(launch.variant.state_dtype),
                   static_cast<int>(launch.variant.weight), launch.variant.amsgrad);
      std::_Exit(1);
    }
  }
}

constexpr uint8_t kHeads[] = {0, 1, 5, AdamCudaRow::kUnaligned, 7, 8, 0, 13, 4, AdamCudaRow::kUnaligned, 3};

// Every size that is close to a step, a chunk or nothing; empty rows first, in the middle and last; inactive ones.
std::vector<Row> rows_of_all_sizes(const AdamVariant& variant, uint64_t key) {
  std::vector<Row> rows;
  for (const int64_t numel : {0, 1, 7, 8, 9, 0, 0, 15, 16, 17, 8191, 8192, 1000, 8193, 16384 + 5, 3, 0}) {
    const size_t r = rows.size();
    const DType g_dtype = variant.p_dtype == F64 ? F64 : std::array{F32, BF16, F16}[(r + key) % 3];
    rows.emplace_back(variant, g_dtype, numel, kHeads[(r + 5 * key) % std::size(kHeads)], key * 100 + r);
    rows.back().scalars.is_active = r % 13 != 12;
  }
  return rows;
}

}  // namespace

TEST(every_variant_equals_the_cpu) {
  uint64_t key = 1;
  for (const AdamVariant& variant : all_variants()) {
    for (int options = 0; options < 4; ++options, ++key) {
      std::vector<Row> before = rows_of_all_sizes(variant, key);
      for (Row& row : before) {
        row.take_scalars(options % 2 == 0);
      }
      const Table table(before);
      AdamLaunch launch = table.launch(variant, 0, before.size(), 3);
      launch.decoupled = options % 2 == 0;
      launch.stochastic = options < 3;
      launch.resync = options != 2;
      fake_cuda::set_seed(key % 4);
      CHECK(launch_adam(launch, nullptr) == cudaSuccess);
      expect_cpu_steps(launch, table, before);
    }
  }
  fake_cuda::set_seed(0);
}

TEST(the_number_of_blocks_and_the_order_of_threads_change_nothing) {
  const AdamVariant variant{BF16, BF16, AdamWeight::kParam, true};
  const std::vector<Row> before = rows_of_all_sizes(variant, 7);
  for (const int max_blocks : {1, 2, 5, 1000}) {
    in_several_orders([&] {
      const Table table(before);
      const AdamLaunch launch = table.launch(variant, 0, before.size(), max_blocks);
      CHECK(launch_adam(launch, nullptr) == cudaSuccess);
      expect_cpu_steps(launch, table, before);
    });
  }
}

TEST(some_rows_of_a_table) {
  const AdamVariant variant{F32, F32, AdamWeight::kParam, false};
  const std::vector<Row> before = rows_of_all_sizes(variant, 3);
  for (const auto& [first, last] : std::vector<std::pair<size_t, size_t>>{{3, 9}, {5, 7}, {0, 1}, {10, 17}, {4, 4}}) {
    const Table table(before);
    const AdamLaunch launch = table.launch(variant, first, last, 2);
    CHECK(launch_adam(launch, nullptr) == cudaSuccess);
    expect_cpu_steps(launch, table, before);
  }
}

TEST(more_elements_than_32_bits_count) {
  constexpr int64_t kNumel = (int64_t{1} << 32) + 3 * kAdamCudaChunkNumel + 5;
  constexpr size_t kBytes = static_cast<size_t>(kNumel) * sizeof(float);
  for (const uint8_t head : {uint8_t{0}, AdamCudaRow::kUnaligned}) {
    const Reserved p(kBytes), g(kBytes), m(kBytes), v(kBytes);
    AdamCudaRow row{};
    row.p = p.as<float>();
    row.g = g.as<float>();
    row.m = m.as<float>();
    row.v = v.as<float>();
    row.numel = kNumel;
    row.g_dtype = F32;
    row.head = head;
    AdamCudaScalars scalars{};
    scalars.is_active = 1;
    scalars.step = 1;
    scalars.scalars = adam_scalars({}, 1, 1.0, true, false);
    const std::vector<int64_t> first_chunk = chunk_starts({kNumel}, kAdamCudaChunkNumel);
    AdamLaunch launch;
    launch.rows = &row;
    launch.first_chunk = first_chunk.data();
    launch.scalars = &scalars;
    launch.last_row = 1;
    launch.chunks = first_chunk[1];
    launch.max_blocks = 1 << 30;
    constexpr int64_t kFrom = kNumel - 5 - 2 * kAdamCudaChunkNumel;
    for (int64_t i = kFrom - 100; i < kNumel; ++i) {
      g.as<float>()[i] = static_cast<float>(some_value(static_cast<uint64_t>(i), true));
    }
    const fake_cuda::OnlyBlocks last(static_cast<uint64_t>(launch.chunks) - 3, static_cast<uint64_t>(launch.chunks));
    CHECK(launch_adam(launch, nullptr) == cudaSuccess);
    for (int64_t i = kFrom - 100; i < kNumel; ++i) {
      float weight = 0, mi = 0, vi = 0;
      adam_element<float>(weight, g.as<float>()[i], mi, vi, nullptr, scalars.scalars.rounded<float>(), true);
      const bool is_done = i >= kFrom;
      CHECK(p.as<float>()[i] == (is_done ? weight : 0.0F) && m.as<float>()[i] == (is_done ? mi : 0.0F));
      CHECK(v.as<float>()[i] == (is_done ? vi : 0.0F));
    }
    CHECK(m.as<float>()[kFrom & 0xffffffff] == 0.0F);  // where 32 bits would have gone
  }
}

TEST(what_there_is_not_is_refused) {
  const Table table({});
  for (const AdamVariant& variant :
       {AdamVariant{F32, F32, AdamWeight::kMaster, false}, AdamVariant{F32, F16, AdamWeight::kParam, false},
        AdamVariant{F64, F32, AdamWeight::kParam, false}, AdamVariant{F16, F32, AdamWeight::kRemainder, false}}) {
    CHECK(launch_adam(table.launch(variant, 0, 0, 1), nullptr) == cudaErrorInvalidValue);
  }
  CHECK(launch_adam(table.launch({}, 0, 0, 1), nullptr) == cudaSuccess);  // nothing to do
  CHECK(launch_adam(table.launch({}, 0, 0, 0), nullptr) == cudaErrorInvalidValue);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
