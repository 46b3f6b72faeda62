// The element types that buckets hold, and their sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/platform.h"

namespace bucketwheel {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt64, kInt32, kUInt8, kInt16, kInt8 };

BW_HD constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
      return 2;
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
  }
  return 0;
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64;
}

// torch's names, in the order of DType.
inline constexpr const char* kDTypeNames[] = {"float32", "bfloat16", "float16", "float64", "int64",
                                              "int32",   "uint8",    "int16",   "int8"};
static_assert(std::size(kDTypeNames) == static_cast<size_t>(DType::kInt8) + 1);
constexpr const char* name_of(DType dtype) {  // it may be a peer's
  return static_cast<size_t>(dtype) < std::size(kDTypeNames) ? kDTypeNames[static_cast<size_t>(dtype)] : "?";
}

}  // namespace bucketwheel
