#include "races.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace fake_cuda {

uint32_t Clock::tick(size_t actor) {
  counts_.resize(std::max(counts_.size(), actor + 1));
  return ++counts_[actor];
}

void Clock::join(const Clock& other) {
  counts_.resize(std::max(counts_.size(), other.counts_.size()));
  for (size_t i = 0; i < other.counts_.size(); ++i) {
    counts_[i] = std::max(counts_[i], other.counts_[i]);
  }
}

bool Clock::covers(const Clock& other) const {
  for (size_t i = 0; i < other.counts_.size(); ++i) {
    if (of(i) < other.counts_[i]) {
      return false;
    }
  }
  return true;
}

// Makes `at` a border between cells.
void Races::split(uintptr_t at) {
  auto cell = cells_.lower_bound(at);
  if (cell == cells_.begin() || (--cell)->second.end <= at) {
    return;
  }
  const Cell upper = cell->second;
  cell->second.end = at;
  cells_.emplace(at, upper);
}

void Races::compare(const Cell& cell, const Use& use, const Clock& known, size_t size_bytes) {
  for (const Use& before : cell.uses) {
    if ((!before.writes && !use.writes) || before.piece.number <= known.of(before.piece.actor)) {
      continue;
    }
    const auto text = [](const Use& one) {
      return std::string(one.writes ? "write by " : "read by ") + one.piece.what + " in " + *one.piece.where;
    };
    if (pairs_.insert(text(before) + '\n' + text(use)).second) {
      found_.push_back(text(before) + " and " + text(use) + ": nothing orders them (one of " +
                       std::to_string(size_bytes) + " bytes)");
    }
  }
}

void Races::access(const void* data, size_t size_bytes, bool writes, const Piece& piece, const Clock& known) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + size_bytes;
  if (size_bytes == 0) {
    return;
  }
  split(begin);
  split(end);
  const Use use{piece, writes};
  uintptr_t covered = begin;
  auto at = cells_.lower_bound(begin);
  while (at != cells_.end() && at->first < end) {
    compare(at->second, use, known, size_bytes);
    if (writes) {
      at = cells_.erase(at);
      continue;
    }
    if (covered < at->first) {
      cells_.emplace(covered, Cell{at->first, {use}});
    }
    covered = at->second.end;
    std::erase_if(at->second.uses, [&](const Use& one) {
      return !one.writes && one.piece.number <= known.of(one.piece.actor);  // whoever is behind `use` is behind it too
    });
    at->second.uses.push_back(use);
    ++at;
  }
  if (covered < end) {
    cells_.emplace(covered, Cell{end, {use}});
  }
}

void Races::forget(const void* data, size_t size_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  split(begin);
  split(begin + size_bytes);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(begin + size_bytes));
}

}  // namespace fake_cuda
