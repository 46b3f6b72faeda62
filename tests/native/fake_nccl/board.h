// The memory that the ranks of one communicator share: a file that all of them map, gone from its folder as soon as all
// have. Ranks meet in it; between two meetings each of them writes what is its own, and afterwards reads what is not.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "script.h"

namespace fake_nccl {

inline constexpr int kMaxWorld = 16;
inline constexpr size_t kStageBytes = size_t{128} << 10;

// Device work and host calls of one communicator meet independently.
enum class Lane { kDevice, kHost };

// What a rank writes before a meeting: of an operation, or of a collective host call.
struct Notice {
  int64_t values[6];
};

class Board {
 public:
  // Rank 0 makes the file `name`, the others wait for it, all of them for each other. Null, with an error code and a
  // text, when that is impossible or `is_stopped`.
  static std::shared_ptr<Board> join(const std::string& name, int rank, int world,
                                     const std::function<bool()>& is_stopped, int* error);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // A name for a file, which no other call anywhere on this host returns; empty when there is no place for files.
  static std::string new_name();

  // Everything that was written before is readable after. Two parities: what is written for a meeting may be read until
  // the next meeting of the lane has begun for everybody, so places alternate. False: stopped.
  template <class Stop>
  bool meet(Lane lane, Stop is_stopped) {
    uint64_t& step = steps_[static_cast<int>(lane)];
    ++step;
    head_->arrived[static_cast<int>(lane)][rank_].store(step, std::memory_order_release);
    for (int peer = 0; peer < world_; ++peer) {
      const auto& arrived = head_->arrived[static_cast<int>(lane)][peer];
      if (!wait_until([&] { return arrived.load(std::memory_order_acquire) >= step; }, is_stopped)) {
        return false;
      }
    }
    return true;
  }
  // Of a rank: the place to write before the next meeting (`ahead` 1), or to read after the last one (0).
  Notice& notice(Lane lane, int rank, uint64_t ahead) {
    return head_->notices[static_cast<int>(lane)][(steps_[static_cast<int>(lane)] + ahead) % 2][rank];
  }
  std::byte* stage(int rank, uint64_t ahead) {
    const uint64_t parity = (steps_[static_cast<int>(Lane::kDevice)] + ahead) % 2;
    return stages_ + (static_cast<size_t>(rank) * 2 + parity) * kStageBytes;
  }
  int rank() const { return rank_; }
  int world() const { return world_; }

 private:
  struct Head {
    int world;
    std::atomic<int> joined;
    std::atomic<int> is_taken[kMaxWorld];
    std::atomic<uint64_t> arrived[2][kMaxWorld];
    Notice notices[2][2][kMaxWorld];
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

  Board(void* data, size_t size_bytes, int rank, int world);

  Head* head_;
  std::byte* stages_;
  size_t size_bytes_;
  int rank_;
  int world_;
  uint64_t steps_[2] = {0, 0};
};

}  // namespace fake_nccl
