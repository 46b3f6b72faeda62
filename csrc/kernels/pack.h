// Copies, casts, additions and zeros of contiguous tensors, many in one call and on all threads: filling a bucket, and
// emptying it.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace bucketwheel {

// to[i] = from[i] for numel elements. Equal dtypes (any) are copied bit by bit. Casts between float32, bfloat16,
// float16 and float64 go through float32 and round to nearest even (float64 to 16 bits rounds twice, as in torch);
// every NaN becomes 0x7fc0 in bfloat16 and 0x7e00 in float16. The targets of no two items overlap.
//
// from     add    to becomes
// memory   false  from, copied or cast
// memory   true   to + from, of floats: computed in float32, or in float64 if either dtype is float64, and rounded to
//                 nearest even (float64 to 16 bits twice, through float32), as torch's to.add_(from)
// nullptr  false  zeros; from_dtype does not matter
// nullptr  true   what it was
struct CopyItem {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t numel = 0;
  DType to_dtype = DType::kFloat32;
  DType from_dtype = DType::kFloat32;
  bool add = false;
};

// TypeError, naming the item, for a pair of dtypes that copy_all() cannot cast or add.
void expect_copyable(const CopyItem& item, size_t index);

// TypeError, naming the item, for another pair of dtypes; nothing is changed then.
void copy_all(std::span<const CopyItem> items);

}  // namespace bucketwheel
