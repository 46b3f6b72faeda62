// kernels/: index arithmetic beyond 2^31, and bounds of every kernel (under the address sanitizer). Run by
// test_native.py.
// needs: base device kernels
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "check.h"
#include "kernels/adam.h"
#include "kernels/cpu_kernels.h"
#include "kernels/crc32c.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "kernels/segment_table.h"

using namespace bucketwheel;

TEST(chunks_cover_every_row_once) {
  SegmentTable table(100);
  const std::vector<int64_t> sizes = {0, 1, 99, 100, 101, 0, 0, 250, 1, 0};
  for (int64_t size : sizes) {
    table.add(size);
  }
  CHECK(table.rows() == 10 && table.chunks() == 1 + 1 + 1 + 2 + 3 + 1);
  std::vector<int64_t> seen(sizes.size());
  SegmentTable::Chunk walked{};
  for (int64_t i = 0; i < table.chunks(); ++i) {
    const SegmentTable::Chunk chunk = table.chunk(i);
    walked = i == 0 ? chunk : table.next(walked);
    CHECK(walked.row == chunk.row && walked.begin == chunk.begin && walked.numel == chunk.numel);
    CHECK(chunk.begin == seen[static_cast<size_t>(chunk.row)]);
    CHECK(chunk.numel > 0 && chunk.numel <= 100);
    seen[static_cast<size_t>(chunk.row)] += chunk.numel;
  }
  CHECK(seen == sizes);
  CHECK_THROWS(ValueError, "-1 elements", table.add(-1));
}

TEST(tables_larger_than_32_bits) {
  SegmentTable table(8192);
  constexpr int64_t kHuge = (int64_t{1} << 40) + 5;
  for (int i = 0; i < 10; ++i) {
    table.add(i % 3 == 0 ? 3 : kHuge);
  }
  CHECK(table.first_element(10) == 6 * kHuge + 4 * 3);
  CHECK(table.chunks() == 6 * ((kHuge + 8191) / 8192) + 4);
  const SegmentTable::Chunk last_of_row_1 = table.chunk(table.first_chunk(2) - 1);
  CHECK(last_of_row_1.row == 1 && last_of_row_1.begin == kHuge - 5 && last_of_row_1.numel == 5);
  const SegmentTable::Chunk first_of_row_2 = table.next(last_of_row_1);
  CHECK(first_of_row_2.row == 2 && first_of_row_2.begin == 0 && first_of_row_2.numel == 8192);
  const SegmentTable::Chunk middle = table.chunk(table.first_chunk(2) + (int64_t{1} << 26));
  CHECK(middle.row == 2 && middle.begin == int64_t{1} << 39);
  SegmentTable limit(8192);
  limit.add(std::numeric_limits<int64_t>::max());
  CHECK(limit.chunk(limit.chunks() - 1).numel == 8191);
}

namespace {

// Exactly n elements on the heap: the address sanitizer sees the first one beyond.
template <class T>
std::unique_ptr<T[]> exactly(int64_t n, T value) {
  auto out = std::make_unique<T[]>(static_cast<size_t>(n));
  std::fill_n(out.get(), n, value);
  return out;
}

}  // namespace

TEST(a_checksum_reads_its_bytes_alone) {
  for (const int64_t bytes : {0, 1, 7, 8, 9, 24575, 24576, 24577, (1 << 20) - 1, (1 << 20) + 3000}) {
    const auto from = exactly<unsigned char>(bytes, 0xab);
    const auto size = static_cast<size_t>(bytes);
    const uint32_t sum = crc32c(from.get(), size);
    uint32_t one_by_one = 0;
    for (size_t i = 0; i < size; ++i) {
      one_by_one = crc32c(from.get() + i, 1, one_by_one);
    }
    CHECK(one_by_one == sum);
  }
  CHECK(crc32c("123456789", 9) == 0xe3069283);  // RFC 3720
}

TEST(every_kind_of_row_stays_within_its_memory) {
  set_num_threads(2);
  const DType halves[] = {DType::kBFloat16, DType::kFloat16};
  for (int kind = 0; kind < 48; ++kind) {
    const auto weight = static_cast<AdamWeight>(kind % 3);
    const bool is_double = kind == 0, is_float = kind == 12 || kind == 36;
    AdamRow row;
    row.weight = weight;
    row.p_dtype = is_double                          ? DType::kFloat64
                  : is_float                         ? DType::kFloat32
                  : weight == AdamWeight::kRemainder ? DType::kBFloat16
                                                     : halves[kind / 3 % 2];
    row.g_dtype = is_double || is_float ? row.p_dtype : halves[kind / 6 % 2];
    row.state_dtype = is_double ? DType::kFloat64 : kind / 12 % 2 != 0 ? DType::kFloat32 : DType::kBFloat16;
    for (int64_t n : {0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 256, 257, 511, 513, 8191, 8193}) {
      std::vector<std::unique_ptr<std::byte[]>> keep;
      const auto array = [&](DType dtype, std::byte fill = std::byte{0x3c}) {
        return keep.emplace_back(exactly<std::byte>(n * static_cast<int64_t>(size_of(dtype)), fill)).get();
      };
      row.p = array(row.p_dtype);
      row.g = array(row.g_dtype, std::byte{0x40});
      row.m = array(row.state_dtype);
      row.v = array(row.state_dtype);
      row.vmax = kind / 24 != 0 ? array(row.state_dtype) : nullptr;
      row.master = weight == AdamWeight::kParam
                       ? nullptr
                       : array(weight == AdamWeight::kMaster ? DType::kFloat32 : DType::kInt16);
      row.numel = n;
      row.param_begin = n % 11;
      AdamTable table;
      table.add(row);
      const AdamGroup group;
      const int64_t taken = 1;
      for (const bool stochastic : {true, false}) {
        AdamStep step;
        step.groups = {&group, 1};
        step.steps = {&taken, 1};
        step.last_row = 1;
        step.stochastic = step.resync = stochastic;
        table.step(step);
      }
      CHECK(n == 0 || keep[2][0] != std::byte{0x3c} || keep[2][1] != std::byte{0x3c});  // m has moved
    }
  }
}

TEST(sums_copies_and_reductions_stay_within_their_memory) {
  set_num_threads(2);
  for (int64_t n : {0, 1, 7, 15, 16, 17, 33, 127, 1023, 1025, 4097, 33000}) {
    const auto a = exactly<float>(n, 2.0F);
    const auto b = exactly<float>(n, 3.0F);
    const auto h = exactly<uint16_t>(n, 0x4000);  // 2
    const auto out = exactly<float>(n, 0.0F);
    const auto out_bf16 = exactly<uint16_t>(n, 0);
    const NormRow rows[] = {{a.get(), n, DType::kFloat32}, {h.get(), n, DType::kBFloat16}};
    for (const SumSquares& sum : sumsq(rows)) {
      CHECK(sum.sumsq == 4.0 * static_cast<double>(n) && !sum.bad);
    }
    for (int world : {1, 2, 3, 4, 5}) {
      const void* floats[] = {a.get(), b.get(), a.get(), b.get(), a.get()};
      const void* halves[] = {h.get(), h.get(), h.get(), h.get(), h.get()};
      reduce_sum_fp32(floats, world, DType::kFloat32, n, out.get());
      const float expected[] = {2, 5, 7, 10, 12};
      CHECK(n == 0 || (out[0] == expected[world - 1] && out[n - 1] == expected[world - 1]));
      reduce_sum_fp32(halves, world, DType::kBFloat16, n, out.get());
      reduce_sum(halves, world, DType::kBFloat16, n, out_bf16.get());
      CHECK(n == 0 || out[n - 1] == 2.0F * static_cast<float>(world));
    }
    const CopyItem items[] = {{out.get(), h.get(), n, DType::kFloat32, DType::kBFloat16},
                              {out_bf16.get(), a.get(), n, DType::kBFloat16, DType::kFloat32}};
    copy_all(items);
    CHECK(n == 0 || (out[n - 1] == 2.0F && out_bf16[n - 1] == 0x4000));
    store_fp32(out_bf16.get(), DType::kBFloat16, b.get(), n);
    store_fp32(out.get(), DType::kFloat32, b.get(), n);
    const auto d = exactly<double>(n, 2.0);
    const auto half = exactly<uint16_t>(n, 0);
    const CopyItem across[] = {{half.get(), d.get(), n, DType::kFloat16, DType::kFloat64}};
    copy_all(across);
    CHECK(n == 0 || half[n - 1] == 0x4000);
    const NormRow more[] = {{d.get(), n, DType::kFloat64}, {half.get(), n, DType::kFloat16}};
    for (const SumSquares& sum : sumsq(more)) {
      CHECK(sum.sumsq == 4.0 * static_cast<double>(n));
    }
    for (int world : {1, 2, 3, 4, 5}) {
      const void* doubles[] = {d.get(), d.get(), d.get(), d.get(), d.get()};
      const auto sum = exactly<double>(n, 0.0);
      reduce_sum(doubles, world, DType::kFloat64, n, sum.get());
      CHECK(n == 0 || sum[n - 1] == 2.0 * world);
    }
    CHECK(n == 0 || (out[n - 1] == 3.0F && out_bf16[n - 1] == 0x4040));
    ShardAccumulator shard(out.get(), DType::kFloat32, n, {{n / 3, n - n / 4}});
    for (const bool add : {false, true}) {
      shard.start(add);
      shard.consume(0, a.get(), n / 2);
      shard.consume(n / 2, a.get() + n / 2, n - n / 2);
      CHECK(shard.results()[0].sumsq == (add ? 16.0 : 4.0) * static_cast<double>(n - n / 4 - n / 3));
    }
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
