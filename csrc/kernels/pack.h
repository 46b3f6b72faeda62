// Copies and casts of contiguous tensors, many in one call and on all threads: filling a bucket, and emptying it.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace bucketwheel {

// to[i] = from[i] for numel elements. Equal dtypes (any) are copied bit by bit; float32 to bfloat16 rounds to nearest
// even (every NaN to 0x7fc0), bfloat16 to float32 is exact. No two items overlap in what they write.
struct CopyItem {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t numel = 0;
  DType to_dtype = DType::kFloat32;
  DType from_dtype = DType::kFloat32;
};

// TypeError, naming the item and before anything is copied, for another pair of dtypes.
void copy_all(std::span<const CopyItem> items);

}  // namespace bucketwheel
