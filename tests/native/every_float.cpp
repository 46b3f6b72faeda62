// The codecs of kernels/float16.h over all 2^32 floats, against what the compiler and plain comparisons say.
// Built (with the processor's float16 conversions where it has them: the compiler's are slow) and run by
// tests/unit/test_float16.py; says what it counted, or the first float that went wrong.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "kernels/float16.h"

using namespace bucketwheel;

namespace {

uint16_t nearest_fp16(float value) {
  return std::isnan(value) ? uint16_t{0x7e00} : __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}

// Of the two bfloat16 around a value the nearer one; of two as near the even one. 2^128 stands for infinity.
uint16_t nearest_bf16(float value) {
  if (std::isnan(value)) {
    return 0x7fc0;
  }
  const auto below = static_cast<uint16_t>(bits_of_float(value) >> 16);  // nearer to zero
  if (widen_bf16(below) == value) {
    return below;
  }
  const auto above = static_cast<uint16_t>(below + 1);
  const double limit = std::isinf(widen_bf16(above)) ? std::copysign(0x1p128, value) : widen_bf16(above);
  const double to_below = std::fabs(static_cast<double>(value) - widen_bf16(below));
  const double to_above = std::fabs(limit - value);
  return to_below < to_above || (to_below == to_above && below % 2 == 0) ? below : above;
}

bool is_right(uint32_t bits) {
  const float value = float_of_bits(bits);
  const SplitMaster split = split_master(value);
  const uint32_t joined = bits_of_float(join_master(split));
  if (std::isnan(value)) {
    if (joined != 0x7fc00000u || !std::isnan(widen_bf16(split.high))) {
      return false;
    }
  } else if (joined != bits || std::isnan(widen_bf16(split.high))) {
    return false;
  }
  // No random bits: towards zero. All of them: to the next one, unless the value is one.
  const uint16_t low = round_to_bf16_stochastic(value, 0);
  const uint16_t high = round_to_bf16_stochastic(value, 0xffff);
  const auto below = static_cast<uint16_t>(bits >> 16);
  const bool between = (bits & 0xffffu) != 0;
  if (std::isnan(value) ? low != 0x7fc0 || high != 0x7fc0 : low != below || high != below + (between ? 1 : 0)) {
    return false;
  }
  return round_to_bf16(value) == nearest_bf16(value) && round_to_fp16(value) == nearest_fp16(value);
}

}  // namespace

int main() {
  for (uint32_t half = 0; half < 0x10000u; ++half) {
    const auto bits = static_cast<uint16_t>(half);
    const auto exact = static_cast<float>(__builtin_bit_cast(_Float16, bits));
    if (std::isnan(exact) ? !std::isnan(widen_fp16(bits)) : bits_of_float(widen_fp16(bits)) != bits_of_float(exact)) {
      std::printf("float16 %04x widens to %08x\n", half, bits_of_float(widen_fp16(bits)));
      return 1;
    }
  }
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<uint64_t> counted(threads);
  std::vector<std::thread> workers;
  for (unsigned t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      uint64_t right = 0;
      for (uint64_t bits = t; bits < (uint64_t{1} << 32); bits += threads, ++right) {
        if (!is_right(static_cast<uint32_t>(bits))) {
          std::printf("wrong at %08x\n", static_cast<uint32_t>(bits));
          return;
        }
      }
      counted[t] = right;
    });
  }
  uint64_t total = 0;
  for (unsigned t = 0; t < threads; ++t) {
    workers[t].join();
    total += counted[t];
  }
  std::printf("%llu right\n", static_cast<unsigned long long>(total));
  return 0;
}
