#include "kernels/pack.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/cpu_kernels.h"
#include "kernels/segment_table.h"

namespace bucketwheel {
namespace {

constexpr int64_t kChunkNumel = 32768;
constexpr int64_t kPackGrainNumel = 65536;  // about 20 us of work

void copy_chunk(const CpuKernels& kernels, const CopyItem& item, int64_t begin, int64_t numel) {
  std::byte* to = static_cast<std::byte*>(item.to) + begin * static_cast<int64_t>(size_of(item.to_dtype));
  const size_t bytes = static_cast<size_t>(numel) * size_of(item.to_dtype);
  if (item.from == nullptr) {
    std::memset(to, 0, item.add ? 0 : bytes);
    return;
  }
  const std::byte* from =
      static_cast<const std::byte*>(item.from) + begin * static_cast<int64_t>(size_of(item.from_dtype));
  if (item.add) {
    kernels.add(to, item.to_dtype, from, item.from_dtype, numel);
  } else if (item.to_dtype == item.from_dtype) {
    if (static_cast<size_t>(item.numel) * size_of(item.to_dtype) < kPastCacheBytes) {
      std::memcpy(to, from, bytes);
    } else {
      kernels.copy_past_cache(to, from, bytes);
    }
  } else {
    kernels.convert(to, item.to_dtype, from, item.from_dtype, numel);
  }
}

}  // namespace

void expect_copyable(const CopyItem& item, size_t index) {
  const bool is_cast = item.add || item.to_dtype != item.from_dtype;
  if (item.from != nullptr && is_cast && !(is_float(item.to_dtype) && is_float(item.from_dtype))) {
    throw TypeError("item " + std::to_string(index) + ": cannot " + (item.add ? "add " : "copy ") +
                    name_of(item.from_dtype) + " to " + name_of(item.to_dtype));
  }
}

void copy_all(std::span<const CopyItem> items) {
  if (items.size() == 1 && items[0].numel <= kChunkNumel) {  // nearly every gradient: no table
    expect_copyable(items[0], 0);
    copy_chunk(cpu_kernels(), items[0], 0, items[0].numel);
    return;
  }
  SegmentTable segments(kChunkNumel);
  for (size_t i = 0; i < items.size(); ++i) {
    expect_copyable(items[i], i);
    segments.add(items[i].numel);
  }
  const int64_t chunks = segments.chunks();
  const int64_t grain = SegmentTable::grain(chunks, segments.first_element(segments.rows()), kPackGrainNumel);
  const CpuKernels& kernels = cpu_kernels();
  parallel_for(chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const SegmentTable::Chunk chunk = segments.chunk(i);
      copy_chunk(kernels, items[static_cast<size_t>(chunk.row)], chunk.begin, chunk.numel);
    }
  });
}

}  // namespace bucketwheel
