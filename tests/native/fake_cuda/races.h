// Which accesses of memory nothing orders: vector clocks, and for each byte who wrote it last and who has read it since.
//
// Bookkeeping only: queues.h says what runs and what it knows. The order in which accesses come in does not matter: a pair
// without order is found whichever comes first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake_cuda {

// How much is known to be over of the work of each actor: the host, and each stream.
class Clock {
 public:
  uint32_t of(size_t actor) const { return actor < counts_.size() ? counts_[actor] : 0; }
  uint32_t tick(size_t actor);  // a piece of the actor's own work; its number
  void join(const Clock& other);
  bool covers(const Clock& other) const;

 private:
  std::vector<uint32_t> counts_;
};

// A piece of work, for messages and for clocks.
struct Piece {
  size_t actor = 0;
  uint32_t number = 0;  // of the actor's work
  const char* what = "";
  const std::string* where = nullptr;  // the actor's name and the place in the code; Races::keep
};

class Races {
 public:
  void access(const void* data, size_t size_bytes, bool writes, const Piece& piece, const Clock& known);
  // Nobody has accessed these bytes: they are new.
  void forget(const void* data, size_t size_bytes);
  // Each pair of places once.
  const std::vector<std::string>& found() const { return found_; }
  const std::string* keep(std::string text) { return &*texts_.insert(std::move(text)).first; }

 private:
  struct Use {
    Piece piece;
    bool writes = false;
  };
  struct Cell {  // bytes from its key in the map on
    uintptr_t end = 0;
    std::vector<Use> uses;  // the last write, and the reads since that nothing later is known to follow
  };
  void split(uintptr_t at);
  void compare(const Cell& cell, const Use& use, const Clock& known, size_t size_bytes);

  std::map<uintptr_t, Cell> cells_;
  std::set<std::string> texts_;
  std::set<std::string> pairs_;
  std::vector<std::string> found_;
};

}  // namespace fake_cuda
