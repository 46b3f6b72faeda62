#include "comm/chunks.h"

#include <algorithm>

namespace bucketwheel {

Chunks::Chunks(const Operation& op, size_t window_bytes) {
  first_.push_back(0);
  size_t used_bytes = 0;
  for (size_t i = 0; i < op.pairs.size(); ++i) {
    const View& shard = op.pairs[i].shard;
    const size_t element_bytes = size_of(shard.dtype);
    for (int64_t begin = 0; begin < shard.numel;) {
      // What is left of the pair if it fits, else as many whole blocks as fit.
      const auto room = static_cast<int64_t>((window_bytes - used_bytes) / element_bytes);
      int64_t numel = shard.numel - begin;
      if (numel > room) {
        numel = room / kSinkBlockNumel * kSinkBlockNumel;
      }
      if (numel == 0) {
        first_.push_back(pieces_.size());
        used_bytes = 0;
        continue;
      }
      const size_t size_bytes = static_cast<size_t>(numel) * element_bytes;
      pieces_.push_back({i, begin, numel, static_cast<size_t>(begin) * element_bytes, size_bytes, used_bytes});
      begin += numel;
      used_bytes = std::min(window_bytes, round_up(used_bytes + size_bytes, kCacheLineBytes));
    }
  }
  if (first_.back() != pieces_.size()) {
    first_.push_back(pieces_.size());
  }
}

}  // namespace bucketwheel
