// kernels/pack_cuda.cu, run by the emulation, against plain loops. Run by test_native.py.
// needs: base device kernels fibers pack_cuda
// runs: address
// slow: address
#include "kernels/pack_cuda.h"

#include <cstdint>
#include <vector>

#include "cuda_memory.h"

using namespace bucketwheel;
using namespace cuda_test;

namespace {

constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
constexpr int64_t kSizes[] = {0, 1, 7, 8, 9, 0, 15, 16, 17, 8191, 16383, 16384, 16385, 32768, 1000, 31, 3, 0};

double as_float(double value) { return static_cast<float>(value); }

// Items of every size, with all kinds of alignment, filled with any bits.
struct Items {
  std::vector<Array> to, from;
  std::vector<CopyItem> items;
  std::vector<int64_t> sizes;

  void add(DType to_dtype, DType from_dtype, int64_t numel, size_t to_skip, size_t from_skip) {
    const uint64_t key = to.size();
    to.emplace_back(to_dtype, numel, to_skip * size_of(to_dtype) % 16);
    from.emplace_back(from_dtype, numel, from_skip * size_of(from_dtype) % 16);
    if (to_dtype == from_dtype) {
      for (int64_t i = 0; i < numel * static_cast<int64_t>(size_of(from_dtype)); ++i) {
        from.back().at<uint8_t>(i) = static_cast<uint8_t>(hash(key * 1'000'003 + static_cast<uint64_t>(i)));
      }
    } else {
      from.back().fill(key);
    }
    items.push_back({to.back().data(), from.back().data(), numel, to_dtype, from_dtype});
    sizes.push_back(numel);
  }

  void copy(int max_blocks) const {
    const std::vector<int64_t> first_chunk = chunk_starts(sizes, kCopyCudaChunkNumel);
    const CopyLaunch launch = {items.data(), first_chunk.data(), static_cast<int64_t>(items.size()), first_chunk.back(),
                               max_blocks};
    CHECK(launch_copy(launch, nullptr) == cudaSuccess);
  }

  void expect_copied() const {
    for (size_t item = 0; item < items.size(); ++item) {
      Array expected(to[item].dtype(), to[item].numel());
      if (to[item].dtype() == from[item].dtype()) {
        const size_t bytes = static_cast<size_t>(sizes[item]) * size_of(expected.dtype());
        CHECK(bytes == 0 || std::memcmp(to[item].data(), from[item].data(), bytes) == 0);
        continue;
      }
      for (int64_t i = 0; i < sizes[item]; ++i) {
        expected.set(i, as_float(from[item].get(i)));
      }
      CHECK(to[item].equals(expected));
    }
  }
};

}  // namespace

TEST(copies_and_casts_between_all_floats_equal_a_plain_loop) {
  for (const DType to : kFloats) {
    for (const DType from : kFloats) {
      Items items;
      for (const int64_t numel : kSizes) {
        const size_t i = items.sizes.size();
        items.add(to, from, numel, i % 4, i % 4);            // aligned together after the same elements
        items.add(to, from, numel, i % 3, 0);                // some never
        items.add(to, from, numel, 16 - i % 8, 16 - i % 8);  // or after more of them
      }
      items.copy(5);
      items.expect_copied();
    }
  }
}

// Their bits: tests/gpu/test_kernels.py. Here: bounds and alignment.
TEST(sums_over_ranks_stay_in_bounds) {
  for (const DType dtype : kFloats) {
    for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{3} * 16384 + 13}) {
      for (const size_t skip : {0, 1, 3}) {  // the last source is aligned with the others, or never
        const Array to(dtype, numel, 3 * size_of(dtype) % 16), source(dtype, numel, 3 * size_of(dtype) % 16);
        const Array last(dtype, numel, skip * size_of(dtype) % 16);
        ReduceLaunch launch;
        launch.to = to.data();
        launch.sources[0] = launch.sources[1] = source.data();
        launch.sources[2] = last.data();
        launch.world = 3;
        launch.dtype = dtype;
        launch.numel = numel;
        launch.max_blocks = 2;
        CHECK(launch_reduce(launch, nullptr) == cudaSuccess);
      }
    }
  }
}

TEST(more_elements_than_32_bits_count) {
  constexpr int64_t kNumel = (int64_t{1} << 32) + kCopyCudaChunkNumel + 5;
  const Reserved wide(static_cast<size_t>(kNumel) * 4);
  const Reserved narrow(static_cast<size_t>(kNumel) * 2);
  const Reserved sum(static_cast<size_t>(kNumel) * 2);
  const CopyItem item = {narrow.as<void>(), wide.as<void>(), kNumel, DType::kBFloat16, DType::kFloat32};
  const std::vector<int64_t> first_chunk = chunk_starts({kNumel}, kCopyCudaChunkNumel);
  const int64_t chunks = first_chunk.back();
  const int64_t begin = (chunks - 2) * kCopyCudaChunkNumel;
  for (int64_t i = begin - 10; i < kNumel; ++i) {
    wide.as<float>()[i] = static_cast<float>(1 + i % 251);
  }
  const fake_cuda::OnlyBlocks last(static_cast<uint64_t>(chunks) - 2, static_cast<uint64_t>(chunks));
  CHECK(launch_copy({&item, first_chunk.data(), 1, chunks, 1 << 30}, nullptr) == cudaSuccess);
  ReduceLaunch launch;
  launch.to = sum.as<void>();
  launch.sources[0] = launch.sources[1] = narrow.as<void>();
  launch.world = 2;
  launch.dtype = DType::kBFloat16;
  launch.numel = kNumel;
  launch.max_blocks = 1 << 30;
  CHECK(launch_reduce(launch, nullptr) == cudaSuccess);
  for (int64_t i = begin - 10; i < kNumel; ++i) {
    const float expected = i < begin ? 0.0F : static_cast<float>(1 + i % 251);
    CHECK(widen_bf16(narrow.as<uint16_t>()[i]) == expected);
    CHECK(widen_bf16(sum.as<uint16_t>()[i]) == 2 * expected);
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
