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
constexpr int64_t kGrainNumel = 65536;  // about 20 us of work

void copy_chunk(const CopyItem& item, int64_t begin, int64_t numel) {
  std::byte* to = static_cast<std::byte*>(item.to) + begin * static_cast<int64_t>(size_of(item.to_dtype));
  const std::byte* from =
      static_cast<const std::byte*>(item.from) + begin * static_cast<int64_t>(size_of(item.from_dtype));
  if (item.to_dtype == item.from_dtype) {
    std::memcpy(to, from, static_cast<size_t>(numel) * size_of(item.to_dtype));
  } else if (item.to_dtype == DType::kFloat32) {
    cpu_kernels().widen(reinterpret_cast<float*>(to), reinterpret_cast<const uint16_t*>(from), numel);
  } else {
    cpu_kernels().narrow(reinterpret_cast<uint16_t*>(to), reinterpret_cast<const float*>(from), numel);
  }
}

bool is_supported(DType to, DType from) {
  return to == from || (to == DType::kFloat32 && from == DType::kBFloat16) ||
         (to == DType::kBFloat16 && from == DType::kFloat32);
}

}  // namespace

void copy_all(std::span<const CopyItem> items) {
  SegmentTable segments(kChunkNumel);
  for (size_t i = 0; i < items.size(); ++i) {
    if (!is_supported(items[i].to_dtype, items[i].from_dtype)) {
      throw TypeError("item " + std::to_string(i) + ": cannot copy " + name_of(items[i].from_dtype) + " to " +
                      name_of(items[i].to_dtype));
    }
    segments.add(items[i].numel);
  }
  const int64_t chunks = segments.chunks();
  const int64_t grain = SegmentTable::grain(chunks, segments.first_element(segments.rows()), kGrainNumel);
  parallel_for(chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const SegmentTable::Chunk chunk = segments.chunk(i);
      copy_chunk(items[static_cast<size_t>(chunk.row)], chunk.begin, chunk.numel);
    }
  });
}

}  // namespace bucketwheel
