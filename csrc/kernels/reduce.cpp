#include "kernels/reduce.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

void expect_summable(DType dtype, bool takes_float64) {
  const bool is_known = dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 ||
                        (dtype == DType::kFloat64 && takes_float64);
  if (!is_known) {
    throw TypeError(std::string("cannot sum ") + name_of(dtype) +
                    (takes_float64 ? ": float32, bfloat16, float16 and float64 are supported"
                                   : " into float32: float32, bfloat16 and float16 are supported"));
  }
}

}  // namespace

void reduce_sum_fp32(const void* const* from, int world, DType dtype, int64_t numel, float* out) {
  expect_summable(dtype, false);
  IeeeFloats ieee;
  cpu_kernels().sum(out, DType::kFloat32, from, dtype, world, numel);
}

void reduce_sum(const void* const* from, int world, DType dtype, int64_t numel, void* out) {
  expect_summable(dtype, true);
  IeeeFloats ieee;
  cpu_kernels().sum(out, dtype, from, dtype, world, numel);
}

void store_fp32(void* to, DType dtype, const float* from, int64_t numel) {
  expect_summable(dtype, true);
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(numel) * sizeof(float));
  } else {
    IeeeFloats ieee;
    cpu_kernels().convert(to, dtype, from, DType::kFloat32, numel);
  }
}

}  // namespace bucketwheel
