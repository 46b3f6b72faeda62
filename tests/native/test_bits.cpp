// kernels/: the same bits on every processor. Hashes of what the kernels make of fixed numbers, written down once: the
// instruction sets of x86 and aarch64 all have to give these. Run by test_native.py.
// needs: base device kernels
// runs: plain address
// slow: address
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include "check.h"
#include "kernels/adam.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"

using namespace bucketwheel;

namespace {

constexpr int64_t kNumel = 20'011;  // chunks, whole vectors and a tail

// FNV-1a.
class Hash {
 public:
  void take(const void* data, size_t size_bytes) {
    const auto* const bytes = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < size_bytes; ++i) {
      value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
    }
  }
  template <class T>
  void take(const std::vector<T>& values) {
    take(values.data(), values.size() * sizeof(T));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// Floats of many magnitudes, subnormal and negative ones among them; the same everywhere.
std::vector<float> numbers(uint64_t seed) {
  std::vector<float> made(kNumel);
  for (float& number : made) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const auto exponent = static_cast<uint32_t>(seed >> 40) % 40 + (seed >> 60 == 0 ? 0u : 100u);
    const uint32_t bits = exponent << 23 | static_cast<uint32_t>(seed >> 33 & 0x807fffffu);
    std::memcpy(&number, &bits, sizeof(number));
  }
  return made;
}

template <class T>
std::vector<T> cast(const std::vector<float>& from, DType dtype) {
  std::vector<T> made(from.size());
  store_fp32(made.data(), dtype, from.data(), static_cast<int64_t>(from.size()));
  return made;
}

template <class T>
void take_steps(Hash& hash, DType dtype, AdamWeight weight, bool has_vmax) {
  std::vector<T> p = cast<T>(numbers(1), dtype);
  std::vector<float> m(kNumel), v(kNumel), vmax(kNumel), master = numbers(1);
  AdamTable table;
  AdamRow row;
  row.p = p.data();
  row.m = m.data();
  row.v = v.data();
  row.vmax = has_vmax ? vmax.data() : nullptr;
  row.master = weight == AdamWeight::kParam ? nullptr : master.data();
  row.numel = kNumel;
  row.p_dtype = dtype;
  row.weight = weight;
  table.add(row);
  const AdamGroup group{1e-3, 0.9, 0.999, 1e-8, 0.01};
  for (int64_t step = 1; step <= 3; ++step) {
    const std::vector<T> g = cast<T>(numbers(10 + static_cast<uint64_t>(step)), dtype);
    table.set_grad(0, g.data(), dtype);
    AdamStep options;
    options.groups = {&group, 1};
    options.steps = {&step, 1};
    options.last_row = 1;
    options.seed = 5;
    table.step(options);
  }
  hash.take(p);
  hash.take(m);
  hash.take(v);
  hash.take(vmax);
  hash.take(master);
}

void expect(const char* what, const Hash& hash, uint64_t expected) {
  if (hash.value() != expected) {
    std::fprintf(stderr, "%s: 0x%016llx, expected 0x%016llx\n", what, static_cast<unsigned long long>(hash.value()),
                 static_cast<unsigned long long>(expected));
  }
  CHECK(hash.value() == expected);
}

TEST(adam) {
  Hash hash;
  take_steps<float>(hash, DType::kFloat32, AdamWeight::kParam, false);
  take_steps<float>(hash, DType::kFloat32, AdamWeight::kParam, true);
  take_steps<uint16_t>(hash, DType::kBFloat16, AdamWeight::kMaster, false);
  take_steps<uint16_t>(hash, DType::kFloat16, AdamWeight::kMaster, true);
  expect("adam", hash, 0x2b640ce17cefac36);
}

TEST(casts) {
  Hash hash;
  hash.take(cast<uint16_t>(numbers(2), DType::kBFloat16));
  hash.take(cast<uint16_t>(numbers(3), DType::kFloat16));
  expect("casts", hash, 0xf6457caf7ed98313);
}

TEST(norms) {
  Hash hash;
  const std::vector<float> floats = numbers(4);
  const std::vector<uint16_t> halves = cast<uint16_t>(numbers(5), DType::kBFloat16);
  const std::vector<NormRow> rows = {{floats.data(), kNumel, DType::kFloat32},
                                     {floats.data() + 1, kNumel - 1, DType::kFloat32},
                                     {halves.data(), kNumel, DType::kBFloat16}};
  for (const SumSquares& sum : sumsq(rows)) {
    hash.take(&sum.sumsq, sizeof(sum.sumsq));
  }
  expect("norms", hash, 0x92a91deecff98773);
}

TEST(reductions) {
  Hash hash;
  const std::vector<float> a = numbers(6), b = numbers(7), c = numbers(8);
  std::vector<float> sums(kNumel);
  const void* const from[] = {a.data(), b.data(), c.data()};
  reduce_sum(from, 3, DType::kFloat32, kNumel, sums.data());
  hash.take(sums);
  const std::vector<uint16_t> d = cast<uint16_t>(a, DType::kBFloat16), e = cast<uint16_t>(b, DType::kBFloat16);
  std::vector<uint16_t> halves(kNumel);
  const void* const narrow[] = {d.data(), e.data()};
  reduce_sum(narrow, 2, DType::kBFloat16, kNumel, halves.data());
  hash.take(halves);
  expect("reductions", hash, 0x606d4362573d3eeb);
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
