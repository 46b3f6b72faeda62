// The rows of the Adam kernels, on every device, and their kinds (variants).
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace bucketwheel {

// Where the precise weight of a parameter is kept.
enum class AdamWeight : uint8_t {
  kParam,      // the parameter itself: float32, float64; or bfloat16, float16 that is rounded at every step
  kMaster,     // a float32 master; the parameter (bfloat16 or float16) is its rounding. `resync` of a step: where it is
               // not, somebody has written to the parameter, and the step goes on from that
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

// `numel` elements of one parameter (or of a piece of one). The memory belongs to the caller and no two arrays overlap.
struct AdamRow {
  void* p = nullptr;
  const void* g = nullptr;  // may be null until the row's first used step
  void* m = nullptr;
  void* v = nullptr;
  void* vmax = nullptr;    // amsgrad's; null: without
  void* master = nullptr;  // float32, or uint16 remainders; null for AdamWeight::kParam
  int64_t numel = 0;
  int64_t param_begin = 0;  // the first element's place in the parameter, in memory order: the key of its random bits
  uint32_t param = 0;       // the parameter's number, below 2^30: the other key
  int32_t group = 0;
  DType p_dtype = DType::kFloat32;      // float32, bfloat16, float16 or float64
  DType g_dtype = DType::kFloat32;      // float32, bfloat16 or float16; float64 with a float64 parameter
  DType state_dtype = DType::kFloat32;  // of m, v and vmax: float32, bfloat16; float64 with a float64 parameter
  AdamWeight weight = AdamWeight::kParam;

  bool operator==(const AdamRow&) const = default;
  AdamVariant variant() const { return {p_dtype, state_dtype, weight, vmax != nullptr}; }
};

}  // namespace bucketwheel
