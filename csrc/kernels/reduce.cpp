#include "kernels/reduce.h"

#include <cstring>

#include "kernels/cpu_kernels.h"

namespace bucketwheel {
void reduce_sum_fp32(const void* const* from, int world, DType dtype, int64_t numel, float* out) {
  IeeeFloats ieee;
  cpu_kernels().sum(out, DType::kFloat32, from, dtype, world, numel);
}

void reduce_sum(const void* const* from, int world, DType dtype, int64_t numel, void* out) {
  IeeeFloats ieee;
  cpu_kernels().sum(out, dtype, from, dtype, world, numel);
}

void store_fp32(void* to, DType dtype, const float* from, int64_t numel) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(numel) * sizeof(float));
  } else {
    IeeeFloats ieee;
    cpu_kernels().convert(to, dtype, from, DType::kFloat32, numel);
  }
}

}  // namespace bucketwheel
