// kernels/norm_cuda.cu and norm_fold_cuda.cu, run by the emulation, against the CPU kernels and, where there are none,
// plain loops. Run by test_native.py.
// needs: base device kernels fibers norm_cuda norm_fold_cuda
// runs: address
// slow: address
#include "kernels/norm_cuda.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "cuda_memory.h"
#include "kernels/norm.h"
#include "kernels/norm_fold.h"

using namespace bucketwheel;
using namespace cuda_test;

namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
constexpr int64_t kSizes[] = {0,    1,    3,    4,     5,     127,   128,  1023, 1024,         1025,
                              2048, 4095, 8191, 32767, 32768, 32769, 8196, 0,    2 * 32768 + 7};
constexpr double kUntouched = -77.0;

bool same_bits(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

std::vector<double> doubles(size_t count, uint64_t key) {
  std::vector<double> out(count);
  for (size_t i = 0; i < count; ++i) {
    out[i] = std::ldexp(static_cast<double>(hash(key + i) >> 11), static_cast<int>(hash(key + i) % 40) - 60);
  }
  return out;
}

}  // namespace

TEST(sums_of_squares_equal_the_cpu) {
  std::vector<Array> arrays;
  std::vector<int64_t> sizes;
  for (const DType dtype : kTypes) {
    for (const int64_t numel : kSizes) {
      const size_t key = arrays.size();
      arrays.emplace_back(dtype, numel, key % 5 * size_of(dtype) % 16);
      arrays.back().fill(key, key % 4 != 3);
      sizes.push_back(numel);
    }
  }
  std::vector<NormCudaRow> rows;
  std::vector<double> expected;  // by chunk
  for (const Array& array : arrays) {
    rows.push_back({array.data(), 0, array.numel(), array.dtype(), 1});
    for (int64_t begin = 0; begin < array.numel(); begin += kNormChunkNumel) {
      const auto begin_bytes = static_cast<size_t>(begin) * size_of(array.dtype());
      const NormRow chunk = {static_cast<std::byte*>(array.data()) + begin_bytes,
                             std::min(array.numel() - begin, kNormChunkNumel), array.dtype()};
      expected.push_back(sumsq({&chunk, 1})[0].sumsq);
    }
  }
  const std::vector<int64_t> first_chunk = chunk_starts(sizes, kNormChunkNumel);
  in_several_orders([&] {
    for (const int max_blocks : {1, 6, 1000}) {
      std::vector<double> partial(expected.size(), kUntouched);
      const SumsqLaunch launch = {rows.data(),        first_chunk.data(), static_cast<int64_t>(rows.size()),
                                  first_chunk.back(), partial.data(),     max_blocks};
      CHECK(launch_sumsq(launch, nullptr) == cudaSuccess);
      for (size_t c = 0; c < expected.size(); ++c) {
        CHECK(same_bits(partial[c], expected[c]));
      }
    }
  });
}

namespace {

// ((a + b) + ...) + old, each addition rounded to float, or to double where the sources are.
template <class Real>
double sum_of(const std::vector<Array>& sources, int64_t i, std::optional<double> old) {
  auto sum = static_cast<Real>(sources[0].get(i));
  for (size_t rank = 1; rank < sources.size(); ++rank) {
    sum += static_cast<Real>(sources[rank].get(i));
  }
  return old ? static_cast<Real>(*old) + sum : sum;
}

// A shard of padding and rows, from sources of one dtype; `skips`: elements between 16-byte alignment and each array.
void accumulate_and_compare(DType shard_dtype, DType dtype, int world, bool add, const std::vector<size_t>& skips) {
  std::vector<NormCudaRow> rows;
  std::vector<int64_t> sizes;
  int64_t numel = 0;
  for (const int64_t size : {5, 0, 1024, 31, 32768 + 4100, 64, 8193, 4096}) {
    rows.push_back({nullptr, numel, size, DType::kFloat32, static_cast<uint8_t>(rows.size() % 3 != 0)});
    sizes.push_back(size);
    numel += size;
  }
  const std::vector<int64_t> first_chunk = chunk_starts(sizes, kNormChunkNumel);
  Array shard(shard_dtype, numel, skips[0] * size_of(shard_dtype) % 16);
  shard.fill(99, world != 2);
  Array expected(shard);
  AccumulateLaunch launch;
  std::vector<Array> sources;
  for (int rank = 0; rank < world; ++rank) {
    sources.emplace_back(dtype, numel, skips[static_cast<size_t>(rank) % skips.size()] * size_of(dtype) % 16);
    sources.back().fill(static_cast<uint64_t>(rank), world != 2);
    launch.sources[rank] = sources.back().data();
  }
  for (int64_t i = 0; i < numel; ++i) {
    const std::optional<double> old = add ? std::optional(expected.get(i)) : std::nullopt;
    expected.set(i, dtype == DType::kFloat64 ? sum_of<double>(sources, i, old) : sum_of<float>(sources, i, old));
  }
  std::vector<double> partial(static_cast<size_t>(first_chunk.back()), kUntouched);
  launch.shard = shard.data();
  launch.shard_dtype = shard_dtype;
  launch.world = world;
  launch.dtype = dtype;
  launch.add = add;
  launch.sums = {rows.data(),        first_chunk.data(), static_cast<int64_t>(rows.size()),
                 first_chunk.back(), partial.data(),     3};
  CHECK(launch_accumulate(launch, nullptr) == cudaSuccess);
  CHECK(shard.equals(expected));
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto begin_bytes = static_cast<size_t>(rows[r].begin) * size_of(shard_dtype);
    const NormRow row = {static_cast<std::byte*>(expected.data()) + begin_bytes, rows[r].numel, shard_dtype};
    const double* sums = partial.data() + first_chunk[r];
    const int64_t chunks = first_chunk[r + 1] - first_chunk[r];
    if (rows[r].is_summed != 0) {
      CHECK(same_bits(fold(sums, chunks), sumsq({&row, 1})[0].sumsq));
    }
    for (int64_t c = 0; rows[r].is_summed == 0 && c < chunks; ++c) {
      CHECK(sums[c] == kUntouched);
    }
  }
}

}  // namespace

TEST(accumulated_shards_and_their_sums_equal_the_cpu) {
  struct Case {
    DType shard, source;
    int worlds;
  };
  const Case cases[] = {{DType::kFloat32, DType::kFloat32, 5},   {DType::kFloat32, DType::kBFloat16, 5},
                        {DType::kFloat32, DType::kFloat16, 5},   {DType::kBFloat16, DType::kFloat32, 2},
                        {DType::kBFloat16, DType::kBFloat16, 2}, {DType::kBFloat16, DType::kFloat16, 2},
                        {DType::kFloat64, DType::kFloat64, 3}};
  for (const auto& [shard, source, worlds] : cases) {
    for (int world = 1; world <= worlds; ++world) {
      for (const bool add : {false, true}) {
        fake_cuda::set_seed(static_cast<uint64_t>(world) % 3);
        accumulate_and_compare(shard, source, world, add, {0});
        accumulate_and_compare(shard, source, world, add, {3});
        accumulate_and_compare(shard, source, world, add, {0, 1});
      }
    }
  }
  fake_cuda::set_seed(0);
}

TEST(chunks_are_folded_by_groups) {
  in_several_orders([] {
    const std::vector<int64_t> chunks = {0, 1, 63, 64, 65, 0, 128, 64 * 256, 64 * 256 + 1, 40'000, 7};
    std::vector<NormCudaRow> rows;
    std::vector<int64_t> first_chunk = {0};
    for (const int64_t count : chunks) {
      rows.push_back({nullptr, 0, 0, DType::kFloat32, static_cast<uint8_t>(count != 7)});
      first_chunk.push_back(first_chunk.back() + count);
    }
    const std::vector<double> partial = doubles(static_cast<size_t>(first_chunk.back()), 5);
    std::vector<double> sums(rows.size(), kUntouched);
    const FoldLaunch launch = {rows.data(), first_chunk.data(), static_cast<int64_t>(rows.size()), partial.data(),
                               sums.data()};
    CHECK(launch_fold(launch, nullptr) == cudaSuccess);
    for (size_t r = 0; r < rows.size(); ++r) {
      CHECK(same_bits(sums[r], rows[r].is_summed == 0 ? kUntouched : fold(partial.data() + first_chunk[r], chunks[r])));
    }
  });
}

TEST(parameters_are_sums_of_their_rows) {
  constexpr size_t kParams = 300'000;  // more than the grid has threads
  std::vector<int64_t> first_row_of = {0};
  std::vector<int64_t> rows_of;
  std::vector<uint8_t> held;
  const std::vector<double> sums = doubles(1000, 2);
  for (size_t param = 0; param < kParams; ++param) {
    for (uint64_t i = 0; i < hash(param) % 4; ++i) {
      rows_of.push_back(static_cast<int64_t>(hash(param + i) % sums.size()));
    }
    first_row_of.push_back(static_cast<int64_t>(rows_of.size()));
    held.push_back(param % 3 != 1);
  }
  for (const bool all : {false, true}) {
    std::vector<double> param_sums(kParams, kUntouched);
    const ParamSumsLaunch launch = {sums.data(), first_row_of.data(), rows_of.data(), all ? nullptr : held.data(),
                                    kParams,     param_sums.data()};
    CHECK(launch_param_sums(launch, nullptr) == cudaSuccess);
    for (size_t param = 0; param < kParams; ++param) {
      double expected = 0.0;
      for (int64_t i = first_row_of[param]; i < first_row_of[param + 1]; ++i) {
        expected += sums[static_cast<size_t>(rows_of[static_cast<size_t>(i)])];
      }
      CHECK(param_sums[param] == (all || held[param] != 0 ? expected : 0.0));
    }
  }
}

TEST(ranks_are_added_in_their_order) {
  for (const size_t params : {size_t{0}, size_t{1}, size_t{257}, size_t{300'000}}) {  // the last: more than threads
    for (const int world : {1, 2, 5}) {
      std::vector<double> by_rank = doubles(params * static_cast<size_t>(world), 5);
      if (params == 257) {
        by_rank[100] = kNaN;
        by_rank[params * static_cast<size_t>(world) - 1] = std::numeric_limits<double>::infinity();
      }
      std::vector<double> sums(params, kUntouched);
      const RankSumsLaunch launch = {by_rank.data(), world, static_cast<int64_t>(params), sums.data()};
      CHECK(launch_rank_sums(launch, nullptr) == cudaSuccess);
      for (size_t param = 0; param < params; ++param) {
        double expected = by_rank[param];
        for (size_t rank = 1; rank < static_cast<size_t>(world); ++rank) {
          expected += by_rank[rank * params + param];
        }
        CHECK(same_bits(sums[param], expected));
      }
    }
  }
}

namespace {

// Variants: 1 chooses all, 2 and 6 do not clip, 3 meets a NaN, 4 has a bound beyond the norm, 5 and 6 reset the factors.
template <class Real>
void clip_and_compare(int64_t count, int variant) {
  const auto size = static_cast<size_t>(count);
  std::vector<double> param_sums = doubles(size, 3);
  std::vector<double> factors = doubles(size, 4);
  std::vector<uint8_t> chosen(size);
  for (size_t i = 0; i < size; ++i) {
    factors[i] = i % 2 == 0 ? factors[i] : -factors[i];
    chosen[i] = variant == 1 || i % 5 != 2;
    param_sums[i] = chosen[i] == 0 || (variant == 3 && i == 0) ? kNaN : param_sums[i];
  }
  std::vector<double> norms(size, kUntouched);
  auto norm = Real{-1};
  ClipLaunch launch;
  launch.param_sums = param_sums.data();
  launch.param_count = count;
  launch.factors = factors.data();
  launch.chosen = variant == 1 ? nullptr : chosen.data();
  launch.average = 0.25;
  launch.resets = variant >= 5;
  launch.clips = variant != 2 && variant != 6;
  launch.norm = &norm;
  launch.is_double = sizeof(Real) == sizeof(double);
  launch.param_norms = norms.data();
  launch.max_norm = variant == 4 ? 1e30F : 0.7F + 0.1F * static_cast<float>(variant);
  const std::vector<double> before = launch.resets ? std::vector<double>(size, 1.0) : factors;
  CHECK(launch_clip(launch, nullptr) == cudaSuccess);

  Fold fold;
  for (size_t i = 0; i < size; ++i) {
    CHECK(same_bits(norms[i], std::sqrt(param_sums[i]) * std::abs(before[i]) * 0.25));
    fold.add(chosen[i] != 0 ? param_sums[i] * (before[i] * before[i]) : 0.0);
  }
  CHECK(same_bits(norm, static_cast<Real>(std::sqrt(fold.result()) * 0.25)));
  const Real ratio = Real{1} / (norm + static_cast<Real>(1e-6)) * static_cast<Real>(launch.max_norm);
  const double coefficient = ratio > Real{1} ? Real{1} : ratio;
  CHECK(variant != 4 || coefficient == 1.0);
  for (size_t i = 0; i < size; ++i) {
    CHECK(same_bits(factors[i], launch.clips && chosen[i] != 0 ? before[i] * coefficient : before[i]));
  }
}

}  // namespace

TEST(clipping_equals_a_plain_loop) {
  in_several_orders([] {
    for (const int64_t count : {0, 1, 63, 64, 65, 1000, 64 * 256 + 3}) {
      for (const int variant : {0, 1, 2, 3, 4, 5, 6}) {
        clip_and_compare<float>(count, variant);
        clip_and_compare<double>(count, variant);
      }
    }
  });
}

TEST(more_elements_than_32_bits_count) {
  constexpr int64_t kNumel = (int64_t{1} << 32) + kNormChunkNumel + 5;
  const Reserved shard(static_cast<size_t>(kNumel) * 4);
  const Reserved source(static_cast<size_t>(kNumel) * 2);
  for (int64_t i = kNumel - 40'000; i < kNumel; ++i) {
    source.as<uint16_t>()[i] = round_to_bf16(static_cast<float>(some_value(static_cast<uint64_t>(i), true)));
  }
  const std::vector<int64_t> first_chunk = chunk_starts({kNumel}, kNormChunkNumel);
  const int64_t chunks = first_chunk.back();
  std::vector<double> partial(static_cast<size_t>(chunks));
  const fake_cuda::OnlyBlocks last(static_cast<uint64_t>(chunks) - 2, static_cast<uint64_t>(chunks));
  NormCudaRow row = {source.as<void>(), 0, kNumel, DType::kBFloat16, 1};
  const SumsqLaunch sums = {&row, first_chunk.data(), 1, chunks, partial.data(), 1 << 30};
  CHECK(launch_sumsq(sums, nullptr) == cudaSuccess);
  const std::vector<double> of_source = partial;

  AccumulateLaunch launch;
  launch.shard = shard.as<float>();
  launch.sources[0] = source.as<void>();
  launch.dtype = DType::kBFloat16;
  launch.sums = sums;
  CHECK(launch_accumulate(launch, nullptr) == cudaSuccess);
  CHECK(partial == of_source);
  const int64_t begin = (chunks - 2) * kNormChunkNumel;
  const NormRow rest[] = {
      {source.as<uint16_t>() + begin, kNormChunkNumel, DType::kBFloat16},
      {source.as<uint16_t>() + begin + kNormChunkNumel, kNumel - begin - kNormChunkNumel, DType::kBFloat16}};
  const std::vector<SumSquares> expected = sumsq(rest);
  for (const size_t c : {0, 1}) {
    CHECK(expected[c].sumsq > 0.0 && partial[static_cast<size_t>(chunks) - 2 + c] == expected[c].sumsq);
  }
  for (int64_t i = begin; i < kNumel; ++i) {
    CHECK(shard.as<float>()[i] == widen_bf16(source.as<uint16_t>()[i]));
  }
}

TEST(what_there_is_not_is_refused) {
  AccumulateLaunch launch;
  launch.sums.max_blocks = 1;
  CHECK(launch_accumulate(launch, nullptr) == cudaSuccess);  // nothing to do
  launch.dtype = DType::kFloat64;                            // into float32
  CHECK(launch_accumulate(launch, nullptr) == cudaErrorInvalidValue);
  launch.dtype = DType::kFloat32;
  launch.world = AccumulateLaunch::kMaxWorld + 1;
  CHECK(launch_accumulate(launch, nullptr) == cudaErrorInvalidValue);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
