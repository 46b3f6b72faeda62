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
  // copy_all() on the device, in `stream`. TypeError, naming the item, for an unknown pair of dtypes; nothing is
  // enqueued then. One stream at a time uses the table: a call in another stream makes that wait for the last use.
  void run(std::span<const CopyItem> items, Stream& stream);

 private:
  CudaDevice& device_;
  CudaBuffer device_items_;
  CudaBuffer device_chunks_;
  LastUse last_use_;
};

}  // namespace bucketwheel
