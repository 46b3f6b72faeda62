#include "kernels/pack_table_cuda.h"

#include <algorithm>

#include "device/device_cuda.h"
#include "kernels/pack_cuda.h"

namespace bucketwheel {

void copy_all_cuda(int device, std::span<const CopyItem> items, Stream& stream) {
  for (size_t i = 0; i < items.size(); ++i) {
    expect_copyable(items[i], i);
  }
  CudaGuard guard(device);
  CopyLaunch launch;
  launch.max_blocks = CudaDevice::at(device).fill_blocks(kCudaBlockThreads);
  for (; !items.empty(); items = items.subspan(static_cast<size_t>(launch.item_count))) {
    launch.item_count = std::min(static_cast<int64_t>(items.size()), CopyLaunch::kMaxItems);
    launch.chunks = 0;
    for (int64_t i = 0; i < launch.item_count; ++i) {
      launch.items[i] = items[static_cast<size_t>(i)];
      launch.chunks += (launch.items[i].numel + kCopyCudaChunkNumel - 1) / kCopyCudaChunkNumel;
      launch.first_chunk[i + 1] = launch.chunks;
    }
    if (launch.chunks > 0) {
      BW_CUDA_TRY(launch_copy, launch, native_stream(stream, "copy"));
    }
  }
}

}  // namespace bucketwheel
