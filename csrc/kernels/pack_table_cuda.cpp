#include "kernels/pack_table_cuda.h"

#include "kernels/segment_table.h"

namespace bucketwheel {
CopyCudaTable::CopyCudaTable(CudaDevice& device) : device_(device), device_items_(device), device_chunks_(device) {}

void CopyCudaTable::run(std::span<const CopyItem> items, Stream& stream) {
  SegmentTable segments(kCopyCudaChunkNumel);
  for (size_t i = 0; i < items.size(); ++i) {
    expect_copyable(items[i], i);
    segments.add(items[i].numel);
  }
  if (segments.chunks() == 0) {
    return;
  }
  CudaGuard guard(device_.id().index);
  last_use_.in(stream, "copy", [&](void* native, bool) {
    CopyLaunch launch;
    launch.items = device_items_.upload<CopyItem>(items, stream);
    launch.first_chunk = device_chunks_.upload<int64_t>(segments.first_chunks(), stream);
    launch.item_count = segments.rows();
    launch.chunks = segments.chunks();
    launch.max_blocks = device_.fill_blocks(kCudaBlockThreads);
    BW_CUDA_TRY(launch_copy, launch, native);
  });
}

}  // namespace bucketwheel
