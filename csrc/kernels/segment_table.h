// Segment table: how a kernel divides rows of any lengths into chunks that threads (or CUDA blocks) take one by one.
//
// Row r owns ceil(numel / chunk_numel) chunks, numbered from the prefix sum of the rows before it, so a chunk never
// crosses a row, an empty row owns none, and a chunk finds its row by binary search. All counts are 64-bit and nothing
// limits the number of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"

namespace bucketwheel {

class SegmentTable {
 public:
  explicit SegmentTable(int64_t chunk_numel) : chunk_numel_(chunk_numel) {}

  void add(int64_t numel) {
    BW_EXPECTS(numel >= 0, "a row cannot have " + std::to_string(numel) + " elements");
    numel_.push_back(numel);
    // Not (numel + chunk - 1) / chunk, which overflows near the top of the range.
    first_chunk_.push_back(first_chunk_.back() + numel / chunk_numel_ + (numel % chunk_numel_ != 0 ? 1 : 0));
    first_element_.push_back(first_element_.back() + numel);
  }

  int64_t rows() const { return static_cast<int64_t>(numel_.size()); }
  int64_t chunk_numel() const { return chunk_numel_; }
  int64_t chunks() const { return first_chunk_.back(); }
  int64_t numel(int64_t row) const { return numel_[static_cast<size_t>(row)]; }
  // The first chunk of a row; of rows(): one past the last chunk. Likewise elements, counted over all rows.
  int64_t first_chunk(int64_t row) const { return first_chunk_[static_cast<size_t>(row)]; }
  std::span<const int64_t> first_chunks() const { return first_chunk_; }
  int64_t first_element(int64_t row) const { return first_element_[static_cast<size_t>(row)]; }

  struct Chunk {
    int64_t row;
    int64_t begin;  // element of the row
    int64_t numel;
  };
  Chunk chunk(int64_t index) const {
    // The last row that starts at or before `index`. (Empty rows before it start there too, and own nothing.)
    const auto after = std::upper_bound(first_chunk_.begin(), first_chunk_.end(), index);
    const int64_t row = (after - first_chunk_.begin()) - 1;
    const int64_t begin = (index - first_chunk(row)) * chunk_numel_;
    return {row, begin, std::min(chunk_numel_, numel(row) - begin)};
  }
  // The chunk after `chunk`, which must not be the last: cheaper than a search.
  Chunk next(Chunk chunk) const {
    chunk.begin += chunk.numel;
    while (chunk.begin == numel(chunk.row)) {
      ++chunk.row;
      chunk.begin = 0;
    }
    chunk.numel = std::min(chunk_numel_, numel(chunk.row) - chunk.begin);
    return chunk;
  }

  // How many of the chunks [first, last) a thread should take at once, so that it gets about `target_numel` elements:
  // many for a table of small rows, one for large rows.
  static int64_t grain(int64_t chunks, int64_t numel, int64_t target_numel) {
    return numel <= target_numel ? std::max<int64_t>(1, chunks) : std::max<int64_t>(1, chunks * target_numel / numel);
  }

 private:
  int64_t chunk_numel_;
  std::vector<int64_t> numel_;
  std::vector<int64_t> first_chunk_{0};
  std::vector<int64_t> first_element_{0};
};

}  // namespace bucketwheel
