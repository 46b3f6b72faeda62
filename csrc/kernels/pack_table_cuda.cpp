#include "kernels/pack_table_cuda.h"

#include <algorithm>

#include "device/cuda_buffer.h"
#include "device/last_use.h"
#include "kernels/cuda_scratch.h"
#include "kernels/pack_cuda.h"
#include "kernels/segment_table.h"

namespace bucketwheel {
namespace {

struct UploadedItems {
  explicit UploadedItems(CudaDevice& device) : items(device), first_chunk(device) {}
  CudaBuffer items;
  CudaBuffer first_chunk;
  LastUse last_use;  // of both
};

}  // namespace

void copy_all_cuda(int device, std::span<const CopyItem> items, Stream& stream) {
  SegmentTable segments(kCopyCudaChunkNumel);
  for (size_t i = 0; i < items.size(); ++i) {
    expect_copyable(items[i], i);
    segments.add(items[i].numel);
  }
  if (segments.chunks() == 0) {
    return;
  }
  CopyLaunch launch;
  launch.item_count = segments.rows();
  launch.chunks = segments.chunks();
  launch.max_blocks = CudaDevice::at(device).fill_blocks(kCudaBlockThreads);
  CudaGuard guard(device);
  const std::span<const int64_t> first_chunk = segments.first_chunks();
  if (launch.item_count <= CopyLaunch::kMaxInline) {
    std::copy(items.begin(), items.end(), launch.inline_items);
    std::copy(first_chunk.begin(), first_chunk.end(), launch.inline_first_chunk);
    BW_CUDA_TRY(launch_copy, launch, native_stream(stream, "copy"));
    return;
  }
  with_cuda_scratch<UploadedItems>(device, stream, [&](UploadedItems& uploaded) {
    uploaded.last_use.in(stream, "copy", [&](void* native, bool) {
      launch.items = uploaded.items.upload<CopyItem>(items, stream);
      launch.first_chunk = uploaded.first_chunk.upload<int64_t>(first_chunk, stream);
      BW_CUDA_TRY(launch_copy, launch, native);
    });
  });
}

}  // namespace bucketwheel
