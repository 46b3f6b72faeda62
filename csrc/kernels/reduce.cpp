#include "kernels/reduce.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

void expect_summable(bool can, const char* what, DType dtype, const char* known) {
  if (!can) {
    throw TypeError(std::string("cannot ") + what + " " + name_of(dtype) + ": " + known + " are supported");
  }
}

}  // namespace

void reduce_sum_fp32(const void* const* from, int world, DType dtype, int64_t numel, float* out) {
  expect_summable(is_float(dtype) && dtype != DType::kFloat64, "sum into float32", dtype,
                  "float32, bfloat16 and float16");
  IeeeFloats ieee;
  cpu_kernels().sum(out, DType::kFloat32, from, dtype, world, numel);
}

void reduce_sum(const void* const* from, int world, DType dtype, int64_t numel, void* out) {
  IeeeFloats ieee;
  cpu_kernels().sum(out, dtype, from, dtype, world, numel);
}

void store_fp32(void* to, DType dtype, const float* from, int64_t numel) {
  expect_summable(is_float(dtype), "round float32 to", dtype, "float32, bfloat16, float16 and float64");
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(numel) * sizeof(float));
  } else {
    IeeeFloats ieee;
    cpu_kernels().convert(to, dtype, from, DType::kFloat32, numel);
  }
}

}  // namespace bucketwheel
