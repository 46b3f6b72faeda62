// CopyCudaTable: copies and casts of many tensors in one launch. The host side of CopyLaunch in pack_cuda.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/cuda_buffer.h"
#include "device/last_use.h"
#include "kernels/pack_cuda.h"

namespace bucketwheel {

class CopyCudaTable {
 public:
  explicit CopyCudaTable(CudaDevice& device);
  // copy_all() on the device, in `stream`. TypeError, naming the item and before anything is enqueued, for a pair of
  // dtypes that it does not know. The table is in the order of one stream at a time.
  void run(std::span<const CopyItem> items, Stream& stream);

 private:
  CudaDevice& device_;
  CudaBuffer device_items_;
  CudaBuffer device_chunks_;
  LastUse last_use_;
};

}  // namespace bucketwheel
