// What the emulation knows of a warp: which lanes there are, and who waits for whom.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>
#include <vector>

namespace fake_cuda {

struct Place {  // of the source
  const char* file = nullptr;
  unsigned line = 0;
  Place() = default;
  explicit Place(std::source_location where) : file(where.file_name()), line(where.line()) {}
  bool operator==(const Place& other) const { return line == other.line && std::strcmp(file, other.file) == 0; }
  std::string text() const {
    const char* slash = std::strrchr(file, '/');
    return std::string(slash == nullptr ? file : slash + 1) + ":" + std::to_string(line);
  }
};

// The shuffles of a warp with one mask, one after the other.
struct Exchange {
  unsigned mask = 0;
  unsigned arrived = 0;  // at the one in progress
  Place place;
  int turn = 0;  // two sets of values: a lane can be at the next shuffle while others still read from this one
  uint64_t values[2][32] = {};
};

struct Warp {
  unsigned exited = 0;  // lanes that ended or never were
  std::vector<Exchange> exchanges;

  size_t exchange(unsigned mask) {
    size_t i = 0;
    while (i < exchanges.size() && exchanges[i].mask != mask) {
      ++i;
    }
    if (i == exchanges.size()) {
      exchanges.emplace_back().mask = mask;
    }
    return i;
  }
};

}  // namespace fake_cuda
