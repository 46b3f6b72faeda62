#include "pool/free_list.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace bucketwheel {
namespace {

// Forgets the fences that are done. They never decide a placement, so this may depend on timing.
void drop_done(std::vector<Fence>& fences) {
  std::erase_if(fences, [](const Fence& fence) { return fence.event->query(); });
}

// Moves what lies at or beyond `offset` to the result; a fence across it is cut in two.
std::vector<Fence> split_fences(std::vector<Fence>& fences, size_t offset) {
  std::vector<Fence> upper;
  while (!fences.empty() && fences.back().end > offset) {
    Fence& last = fences.back();
    if (last.begin >= offset) {
      upper.push_back(std::move(last));
      fences.pop_back();
    } else {
      upper.push_back({offset, last.end, last.event});
      last.end = offset;
    }
  }
  std::reverse(upper.begin(), upper.end());
  return upper;
}

std::string describe(const FreeList::Block& block) {
  return "slab " + std::to_string(block.span->slab->id) + " block [" + std::to_string(block.offset_bytes) + ", " +
         std::to_string(block.offset_bytes + block.size_bytes) + ")";
}

}  // namespace

FreeList::Key FreeList::key_of(Block* block) {
  return {block->size_bytes, block->span->slab->id, block->offset_bytes, block};
}

FreeList::Block* FreeList::new_block() {
  if (spare_blocks_.empty()) {
    return &storage_.emplace_back();
  }
  Block* block = spare_blocks_.back();
  spare_blocks_.pop_back();
  return block;
}

void FreeList::recycle(Block* block) {
  block->fences.clear();
  block->owner = nullptr;
  block->is_free = false;
  block->previous = block->next = nullptr;
  spare_blocks_.push_back(block);
}

void FreeList::insert_free(Block* block) {
  block->is_free = true;
  free_.insert(key_of(block));
}

void FreeList::erase_free(FreeSet::iterator position) {
  position->block->is_free = false;
  free_.erase(position);
}

void FreeList::add(SlabRef slab) {
  Span& span = spans_[slab->id];
  span.slab = std::move(slab);
  span.first = new_block();
  span.first->span = &span;
  span.first->offset_bytes = 0;
  span.first->size_bytes = span.slab->size_bytes;
  insert_free(span.first);
}

std::vector<std::pair<SlabRef, std::vector<Fence>>> FreeList::remove_unused() {
  std::vector<std::pair<SlabRef, std::vector<Fence>>> removed;
  for (auto it = spans_.begin(); it != spans_.end();) {
    Block* block = it->second.first;
    if (!block->is_free || block->next != nullptr) {
      ++it;
      continue;
    }
    erase_free(free_.find(key_of(block)));
    removed.emplace_back(std::move(it->second.slab), std::move(block->fences));
    recycle(block);
    it = spans_.erase(it);
  }
  return removed;
}

bool FreeList::can_take(size_t size_bytes) const {
  return free_.lower_bound({size_bytes, 0, 0, nullptr}) != free_.end();
}

FreeList::Block* FreeList::try_take(size_t size_bytes, bool* is_reused) {
  const auto position = free_.lower_bound({size_bytes, 0, 0, nullptr});
  if (position == free_.end()) {
    return nullptr;
  }
  Block* block = position->block;
  erase_free(position);
  if (block->size_bytes > size_bytes) {
    Block* rest = new_block();
    rest->span = block->span;
    rest->offset_bytes = block->offset_bytes + size_bytes;
    rest->size_bytes = block->size_bytes - size_bytes;
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != nullptr) {
      rest->next->previous = rest;
    }
    block->next = rest;
    block->size_bytes = size_bytes;
    if (!block->fences.empty()) {
      rest->fences = split_fences(block->fences, rest->offset_bytes);
    }
    insert_free(rest);
  }
  // A free range is taken from its front, so the bytes never taken are one piece at the end of the slab.
  Span& span = *block->span;
  *is_reused = block->offset_bytes < span.touched_bytes;
  span.touched_bytes = std::max(span.touched_bytes, block->offset_bytes + size_bytes);
  return block;
}

// Joins the next block, no longer in the free set, to this one.
void FreeList::absorb_next(Block* block) {
  Block* next = block->next;
  block->size_bytes += next->size_bytes;
  block->next = next->next;
  if (block->next != nullptr) {
    block->next->previous = block;
  }
  if (block->fences.empty()) {
    block->fences.swap(next->fences);
  } else {
    block->fences.insert(block->fences.end(), std::make_move_iterator(next->fences.begin()),
                         std::make_move_iterator(next->fences.end()));
  }
  recycle(next);
}

void FreeList::give(Block* block) {
  block->owner = nullptr;
  if (block->next != nullptr && block->next->is_free) {
    erase_free(free_.find(key_of(block->next)));
    absorb_next(block);
  }
  if (block->previous != nullptr && block->previous->is_free) {
    block = block->previous;
    erase_free(free_.find(key_of(block)));
    absorb_next(block);
  }
  drop_done(block->fences);
  insert_free(block);
}

std::string FreeList::find_fault(size_t align_bytes) const {
  size_t free_blocks = 0;
  for (const auto& [id, span] : spans_) {
    size_t offset = 0;
    const Block* previous = nullptr;
    for (Block* block = span.first; block != nullptr; previous = block, block = block->next) {
      if (block->span != &span || block->previous != previous || block->offset_bytes != offset ||
          block->size_bytes == 0) {
        return describe(*block) + " does not follow the block before it";
      }
      if (block->offset_bytes % align_bytes != 0) {
        return describe(*block) + " is not aligned to " + std::to_string(align_bytes);
      }
      if (block->is_free && previous != nullptr && previous->is_free) {
        return describe(*block) + " and the one before it are free and not joined";
      }
      if (block->is_free != (free_.count(key_of(block)) == 1)) {
        return describe(*block) + " is free and not listed, or listed and not free";
      }
      size_t fenced = offset;
      for (const Fence& fence : block->fences) {
        if (!block->is_free || fence.begin < fenced || fence.end <= fence.begin ||
            fence.end > offset + block->size_bytes) {
          return describe(*block) + " has a fence that is out of place";
        }
        fenced = fence.end;
      }
      free_blocks += block->is_free ? 1 : 0;
      offset += block->size_bytes;
    }
    if (offset != span.slab->size_bytes) {
      return "slab " + std::to_string(id) + ": its blocks cover " + std::to_string(offset) + " of " +
             std::to_string(span.slab->size_bytes) + " bytes";
    }
  }
  if (free_blocks != free_.size()) {
    return "the free list holds " + std::to_string(free_.size()) + " ranges, the slabs " + std::to_string(free_blocks);
  }
  return {};
}

}  // namespace bucketwheel
