// The fake NCCL, and our use of NCCL's functions through it: data, order, streams, splits, groups. Run by
// test_native.py.
// needs: base comm device kernels pool fake_nccl
// link: -rdynamic
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "nccl_ranks.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

// Values whose sums show the order of the additions.
float value(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101) * (rank == 1 ? 1e6f : 0.37f);
}

template <class T>
T as(float from) {
  return static_cast<T>(from);
}
struct BFloat16 {
  uint16_t bits;
};
template <>
BFloat16 as<BFloat16>(float from) {
  return {round_to_bf16(from)};
}

template <class T>
std::vector<T> values(int rank, size_t count) {
  std::vector<T> out(count);
  for (size_t i = 0; i < count; ++i) {
    out[i] = as<T>(value(rank, i));
  }
  return out;
}
template <class T>
bool are_equal(const T* a, const T* b, size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
}

// Reduce-scatter and all-reduce have the bits of reduce_sum; all-gather and broadcast move. In place and not.
template <class T>
void check_data(DType dtype, size_t count, int world) {
  std::vector<std::vector<T>> inputs;
  std::vector<const void*> from;
  const size_t full = count * static_cast<size_t>(world);
  for (int rank = 0; rank < world; ++rank) {
    inputs.push_back(values<T>(rank, full));
  }
  for (const auto& one : inputs) {
    from.push_back(one.data());
  }
  std::vector<T> sums(full);
  reduce_sum(from.data(), world, dtype, static_cast<int64_t>(full), sums.data());
  on_ranks(world, [&](int rank, NcclCommRef comm) {
    const size_t own = count * static_cast<size_t>(rank);
    const NcclType type = nccl_type(dtype);
    for (const bool in_place : {false, true}) {
      std::vector<T> full_buffer = inputs[static_cast<size_t>(rank)];
      std::vector<T> shard_buffer(count);
      T* const shard = in_place ? full_buffer.data() + own : shard_buffer.data();
      BW_NCCL_TRY(api(), reduce_scatter, full_buffer.data(), shard, count, type, kNcclSum, comm, nullptr);
      CHECK(are_equal(shard, sums.data() + own, count));

      std::vector<T> gathered(full);
      T* const send = in_place ? gathered.data() + own : shard;
      std::copy(sums.data() + own, sums.data() + own + count, send);
      BW_NCCL_TRY(api(), all_gather, send, gathered.data(), count, type, comm, nullptr);
      CHECK(are_equal(gathered.data(), sums.data(), full));

      std::vector<T> reduced = inputs[static_cast<size_t>(rank)];
      std::vector<T> elsewhere(full);
      T* const to = in_place ? reduced.data() : elsewhere.data();
      BW_NCCL_TRY(api(), all_reduce, reduced.data(), to, full, type, kNcclSum, comm, nullptr);
      CHECK(are_equal(to, sums.data(), full));

      const int root = world - 1;
      std::vector<T> told = rank == root || !in_place ? inputs[static_cast<size_t>(rank)] : std::vector<T>(full);
      T* const heard = in_place ? told.data() : elsewhere.data();
      BW_NCCL_TRY(api(), broadcast, told.data(), heard, full, type, root, comm, nullptr);
      CHECK(are_equal(heard, inputs[static_cast<size_t>(root)].data(), full));
    }
  });
}

TEST(data) {
  for (int world = 1; world <= 4; ++world) {
    check_data<float>(DType::kFloat32, 1000, world);
    check_data<BFloat16>(DType::kBFloat16, 999, world);
    check_data<double>(DType::kFloat64, 17, world);
    check_data<float>(DType::kFloat32, 0, world);
  }
  check_data<float>(DType::kFloat32, 200001, 3);  // more than a stage
}

TEST(other_reductions) {
  on_ranks(3, [](int rank, NcclCommRef comm) {
    const auto reduced = [&](auto in, int op, NcclType type) {
      BW_NCCL_TRY(api(), all_reduce, &in, &in, 1, type, op, comm, nullptr);
      return in;
    };
    const auto mine = static_cast<float>(rank);
    CHECK(reduced(mine + 2.0f, kNcclProd, NcclType::kFloat32) == 24.0f);
    CHECK(reduced(mine - 7.0f, kNcclMax, NcclType::kFloat32) == -5.0f);
    CHECK(reduced(int64_t{rank} - 7, kNcclMin, NcclType::kInt64) == -7);
    CHECK(reduced(rank * 5, kNcclSum, NcclType::kInt32) == 15);
    // An average is divided before it is rounded: 1 + 2^-8 + 2^-8 + ... is not lost.
    const uint16_t mean = reduced(round_to_bf16(1.0f + mine), kNcclAvg, NcclType::kBFloat16);
    CHECK(widen_bf16(mean) == 2.0f);

    float factor = 0.3f;
    int op = -1;
    BW_NCCL_TRY(api(), red_op_create_pre_mul_sum, &op, &factor, NcclType::kFloat32, kNcclScalarHostImmediate, comm);
    factor = 100.0f;  // was read
    CHECK(reduced(mine + 1.0f, op, NcclType::kFloat32) == (1.0f * 0.3f + 2.0f * 0.3f) + 3.0f * 0.3f);
    double wrong = 1;
    CHECK(BW_NCCL_CALL(api(), all_reduce, &wrong, &wrong, 1, NcclType::kFloat64, op, comm, nullptr) == 4);
    BW_NCCL_TRY(api(), red_op_destroy, op, comm);
    CHECK(BW_NCCL_CALL(api(), red_op_destroy, op, comm) == kNcclInvalidArgument);
    BW_NCCL_TRY(api(), red_op_create_pre_mul_sum, &op, &factor, NcclType::kFloat32, kNcclScalarDevice, comm);
    factor = 2.0f;  // is read when the sum is made
    CHECK(reduced(1.0f, op, NcclType::kFloat32) == 6.0f);
  });
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
