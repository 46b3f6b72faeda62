// kernels/pack_cuda.cu, run by the emulation, against plain loops. Run by test_native.py.
// needs: base device kernels fibers pack_cuda
// runs: address
// slow: address
#include "kernels/pack_cuda.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda_memory.h"

using namespace bucketwheel;
using namespace cuda_test;

namespace {

constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
constexpr int64_t kSizes[] = {0, 1, 7, 8, 9, 0, 15, 16, 17, 8191, 16383, 16384, 16385, 32768, 1000, 31, 3, 0};

double as_float(double value) { return static_cast<float>(value); }

// What pack.h says of an element.
double taken(const CopyItem& item, double before, double value) {
  if (!item.add) {
    return as_float(value);
  }
  const bool is_double = item.to_dtype == DType::kFloat64 || item.from_dtype == DType::kFloat64;
  return is_double ? before + value : static_cast<float>(before) + static_cast<float>(value);
}

// Items of every size, with all kinds of alignment, filled with any bits.
struct Items {
  std::vector<Array> to, from, before;  // before: what `to` holds before the launch
  std::vector<CopyItem> items;
  std::vector<int64_t> sizes;

  void add(DType to_dtype, DType from_dtype, int64_t numel, size_t to_skip, size_t from_skip, bool adds = false) {
    const uint64_t key = to.size();
    to.emplace_back(to_dtype, numel, to_skip * size_of(to_dtype) % 16);
    from.emplace_back(from_dtype, numel, from_skip * size_of(from_dtype) % 16);
    to.back().fill(key + 77);
    before.emplace_back(to_dtype, numel, 0).fill(key + 77);
    if (to_dtype == from_dtype && !adds) {
      for (int64_t i = 0; i < numel * static_cast<int64_t>(size_of(from_dtype)); ++i) {
        from.back().at<uint8_t>(i) = static_cast<uint8_t>(hash(key * 1'000'003 + static_cast<uint64_t>(i)));
      }
    } else {
      from.back().fill(key);
    }
    items.push_back({to.back().data(), from.back().data(), numel, to_dtype, from_dtype, adds});
    sizes.push_back(numel);
  }
  // Zeros, or with `adds` nothing.
  void add_nothing(DType dtype, int64_t numel, size_t skip, bool adds) {
    add(dtype, DType::kUInt8, numel, skip, 0, adds);
    items.back().from = nullptr;
  }

  void copy(int max_blocks) const {
    const std::vector<int64_t> first_chunk = chunk_starts(sizes, kCopyCudaChunkNumel);
    CopyLaunch launch;
    launch.item_count = static_cast<int64_t>(items.size());
    launch.chunks = first_chunk.back();
    launch.max_blocks = max_blocks;
    CHECK(launch.item_count <= CopyLaunch::kMaxItems);
    std::copy(items.begin(), items.end(), launch.items);
    std::copy(first_chunk.begin(), first_chunk.end(), launch.first_chunk);
    for (size_t item = 0; item < items.size(); ++item) {
      for (int64_t i = 0; i < sizes[item]; ++i) {
        to[item].set(i, before[item].get(i));
      }
    }
    CHECK(launch_copy(launch, nullptr) == cudaSuccess);
    expect_copied();
    expect_copied_on_the_cpu();
  }

  void expect_copied() const {
    for (size_t item = 0; item < items.size(); ++item) {
      const Array expected(to[item].dtype(), to[item].numel());
      if (items[item].from == nullptr) {
        CHECK(to[item].equals(items[item].add ? before[item] : expected));
        continue;
      }
      if (to[item].dtype() == from[item].dtype() && !items[item].add) {
        const size_t bytes = static_cast<size_t>(sizes[item]) * size_of(expected.dtype());
        CHECK(bytes == 0 || std::memcmp(to[item].data(), from[item].data(), bytes) == 0);
        continue;
      }
      for (int64_t i = 0; i < sizes[item]; ++i) {
        expected.set(i, taken(items[item], before[item].get(i), from[item].get(i)));
      }
      CHECK(to[item].equals(expected));
    }
  }

  void expect_copied_on_the_cpu() const {
    std::vector<CopyItem> there = items;
    for (size_t item = 0; item < items.size(); ++item) {
      there[item].to = before[item].data();
    }
    copy_all(there);
    for (size_t item = 0; item < items.size(); ++item) {
      CHECK(before[item].equals(to[item]));
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
    }
  }
}

TEST(sums_of_any_two_floats_equal_a_plain_loop) {
  for (const DType to : kFloats) {
    for (const DType from : kFloats) {
      Items items;
      for (const int64_t numel : kSizes) {
        const size_t i = items.sizes.size();
        items.add(to, from, numel, i % 4, i % 4, true);
        items.add(to, from, numel, i % 3, 0, true);
      }
      items.copy(5);
    }
  }
}

TEST(one_launch_copies_casts_adds_and_zeroes) {
  Items items;
  for (const int64_t numel : kSizes) {
    const size_t i = items.sizes.size();
    items.add_nothing(kFloats[i % 4], numel, i % 16, false);
    items.add(DType::kBFloat16, DType::kFloat32, numel, i % 8, i % 3);
    items.add(DType::kUInt8, DType::kUInt8, numel, i % 16, i % 5);
    items.add(DType::kFloat32, DType::kBFloat16, numel, i % 4, i % 7, true);
    items.add_nothing(i % 2 == 0 ? DType::kUInt8 : DType::kFloat16, numel, i % 7, i % 3 == 0);
  }
  items.copy(7);
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
  const int64_t chunks = chunk_starts({kNumel}, kCopyCudaChunkNumel).back();
  const int64_t begin = (chunks - 2) * kCopyCudaChunkNumel;
  for (int64_t i = begin - 10; i < kNumel; ++i) {
    wide.as<float>()[i] = static_cast<float>(1 + i % 251);
  }
  const fake_cuda::OnlyBlocks last(static_cast<uint64_t>(chunks) - 2, static_cast<uint64_t>(chunks));
  CopyLaunch copy;
  copy.items[0] = item;
  copy.first_chunk[1] = copy.chunks = chunks;
  copy.item_count = 1;
  copy.max_blocks = 1 << 30;
  CHECK(launch_copy(copy, nullptr) == cudaSuccess);
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
