// FreeList: which bytes of a pool's slabs are free. Best fit over ranges in address order, with coalescing.
//
// Not thread-safe. The result depends on the calls alone: a block is taken from the front of the smallest free range
// that fits; among equals, of the one with the lowest (slab id, offset). So ranks that make the same calls get the
// same offsets.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory_resource>
#include <set>
#include <string>
#include <vector>

#include "device/event.h"
#include "pool/upstream.h"

namespace bucketwheel {

// Bytes [begin, end) of a slab may be overwritten once `event` is complete.
struct Fence {
  size_t begin = 0;
  size_t end = 0;
  EventRef event;
};

class FreeList {
 public:
  struct Span;

  // A range of a slab, free or taken. Blocks of a slab are linked in address order and cover it.
  struct Block {
    Span* span = nullptr;
    size_t offset_bytes = 0;
    size_t size_bytes = 0;
    bool is_free = false;
    Block* previous = nullptr;
    Block* next = nullptr;
    // Fences of the bytes' last users, disjoint, in address order. The taker of the block gets them.
    std::vector<Fence> fences;
    void* owner = nullptr;  // of a taken block; set and read by the taker
  };

  // A slab and its blocks.
  struct Span {
    SlabRef slab;
    Block* first = nullptr;
    size_t touched_bytes = 0;  // bytes beyond have never been taken
  };

  void add(SlabRef slab);
  // Removes the slabs that have no taken block, and returns them with their fences.
  std::vector<std::pair<SlabRef, std::vector<Fence>>> remove_unused();

  bool can_take(size_t size_bytes) const;
  // A block of exactly `size_bytes` (> 0), or null when no free range is large enough. `is_reused`: some of its bytes
  // had been taken before.
  Block* try_take(size_t size_bytes, bool* is_reused);
  // Frees a taken block with the fences in block->fences. The pointer is dead afterwards.
  void give(Block* block);

  const std::map<uint32_t, Span>& spans() const { return spans_; }
  // The first broken invariant, or empty.
  std::string find_fault(size_t align_bytes) const;

 private:
  struct Key {
    size_t size_bytes;
    uint32_t slab_id;
    size_t offset_bytes;
    Block* block;
    auto operator<=>(const Key&) const = default;
  };
  using FreeSet = std::pmr::set<Key>;

  static Key key_of(Block* block);
  Block* new_block();
  void recycle(Block* block);
  void insert_free(Block* block);
  void erase_free(FreeSet::iterator position);
  void absorb_next(Block* block);

  std::pmr::unsynchronized_pool_resource memory_;  // of the set, whose nodes are reused; as blocks are
  FreeSet free_{&memory_};
  std::map<uint32_t, Span> spans_;  // by slab id; nodes do not move
  // In a steady state acquire and release allocate nothing.
  std::deque<Block> storage_;
  std::vector<Block*> spare_blocks_;
};

}  // namespace bucketwheel
