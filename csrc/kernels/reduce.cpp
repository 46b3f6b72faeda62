#include "kernels/reduce.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/cpu_kernels.h"

namespace bucketwheel {
namespace {

bool is_float32(DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) {
    throw TypeError(std::string("cannot sum ") + name_of(dtype) + ": float32 and bfloat16 are supported");
  }
  return dtype == DType::kFloat32;
}

}  // namespace

void reduce_sum_fp32(const void* const* from, int world, DType dtype, int64_t numel, float* out) {
  IeeeFloats ieee;
  (is_float32(dtype) ? cpu_kernels().sum_f32 : cpu_kernels().sum_bf16_to_f32)(out, from, world, numel);
}

void reduce_sum(const void* const* from, int world, DType dtype, int64_t numel, void* out) {
  IeeeFloats ieee;
  if (is_float32(dtype)) {
    cpu_kernels().sum_f32(static_cast<float*>(out), from, world, numel);
  } else {
    cpu_kernels().sum_bf16(static_cast<uint16_t*>(out), from, world, numel);
  }
}

void store_fp32(void* to, DType dtype, const float* from, int64_t numel) {
  if (is_float32(dtype)) {
    std::memcpy(to, from, static_cast<size_t>(numel) * sizeof(float));
  } else {
    cpu_kernels().narrow(static_cast<uint16_t*>(to), from, numel);
  }
}

}  // namespace bucketwheel
