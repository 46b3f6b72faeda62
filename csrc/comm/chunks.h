// Chunks: how a staged operation is cut into pieces that fit the staging buffers. Equal on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/align.h"
#include "comm/operation.h"

namespace bucketwheel {

// [Note: chunks] The shards of all pairs are laid one after the other and cut into windows of at most
// `window_bytes`. Small tensors share a window, large ones span several. A staging slot of an all-gather holds one
// window, of the rank's shards; that of a reduce-scatter one window for each peer, of the parts that the peer will
// own. Pieces begin at multiples of kSinkBlockNumel, as reduction sinks want it.
struct Piece {
  size_t pair;
  int64_t begin;  // element of the shard
  int64_t numel;
  size_t begin_bytes;  // the same two in bytes
  size_t size_bytes;
  size_t offset_bytes;  // in the window
};

class Chunks {
 public:
  Chunks(const Operation& op, size_t window_bytes);
  uint64_t count() const { return first_.size() - 1; }
  const Piece* begin(uint64_t chunk) const { return pieces_.data() + first_[chunk]; }
  const Piece* end(uint64_t chunk) const { return pieces_.data() + first_[chunk + 1]; }

 private:
  std::vector<Piece> pieces_;
  std::vector<size_t> first_;  // of each chunk, and the end
};

}  // namespace bucketwheel
