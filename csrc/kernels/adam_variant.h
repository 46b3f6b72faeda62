// What kinds of rows the Adam kernels know, on every device.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace bucketwheel {

// Where the precise weight of a parameter is kept.
enum class AdamWeight : uint8_t {
  kParam,      // the parameter itself: float32, float64; or bfloat16, float16 that is rounded at every step
  kMaster,     // a float32 master; the parameter (bfloat16 or float16) is its rounding
  kRemainder,  // 16 bits more for each element of a bfloat16 parameter: [Note: split master] in float16.h
};

// Rows of one variant can go in one launch: the template arguments of the CUDA kernel.
struct AdamVariant {
  DType p_dtype = DType::kFloat32;
  DType state_dtype = DType::kFloat32;  // of m, v and vmax: float32, bfloat16, or float64 with a float64 parameter
  AdamWeight weight = AdamWeight::kParam;
  bool amsgrad = false;
  bool operator==(const AdamVariant&) const = default;
};

}  // namespace bucketwheel
