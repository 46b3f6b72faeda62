// Communicators of the fake: what they are made of, the order of their device work, and that work.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "board.h"
#include "script.h"

namespace fake_nccl {

// The order of the work of one communicator, and of its children that share resources with it: as it was issued,
// whatever streams it is in.
class Queue {
 public:
  uint64_t take() {
    std::lock_guard lock(mutex_);
    return issued_++;
  }
  bool is_turn(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    return done_ == ticket;
  }
  // Before its turn: the ticket of work that is not done.
  void finish(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    finished_.insert(ticket);
    while (finished_.erase(done_) != 0) {
      ++done_;
    }
  }

 private:
  std::mutex mutex_;
  uint64_t issued_ = 0;
  uint64_t done_ = 0;
  std::set<uint64_t> finished_;
};

// A reduction of ncclRedOpCreatePreMulSum.
struct PreMul {
  bucketwheel::NcclType type;
  std::array<std::byte, 8> scalar;
};

enum class Function : uint8_t { kAllGather, kReduceScatter, kBroadcast };

struct Operation {
  Function function;
  const void* send;
  void* recv;
  size_t count;
  bucketwheel::NcclType type;
  int reduce;  // kNcclSum, kNcclAvg, kPreMulSum
  int root;
  PreMul premul;
  bool hangs;
};

struct Comm {
  int rank = 0;
  int world = 0;
  std::string name;  // of the file, which is gone
  bucketwheel::NcclConfig config;
  std::shared_ptr<Board> board;
  std::shared_ptr<Queue> queue;

  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{0};         // of work
  std::string error_text;            // written before `error`, once
  std::atomic<uint64_t> pending{0};  // batches that were launched and are not done
  std::atomic<uint64_t> running{0};  // of these, the ones that may touch memory

  // Of the calling thread, one at a time.
  bool is_finalized = false;
  uint64_t children = 0;
  int next_reduce = bucketwheel::kNcclAvg + 1;
  std::map<int, PreMul> reductions;

  void set_error(int code, const std::string& text) {
    error_text = text;
    error = code;
  }
  // `error`, with its text for the calling thread.
  int tell_error() const {
    const int code = error;
    return code == 0 ? 0 : fail(code, error_text);
  }
};
using CommPtr = std::shared_ptr<Comm>;

// Handles are never used twice, so one that is no longer alive is known to be that.
bucketwheel::NcclCommRef add_comm(CommPtr comm);
CommPtr find_comm(bucketwheel::NcclCommRef handle);  // null: none that is alive
void remove_comm(bucketwheel::NcclCommRef handle);
uint64_t removed_comms();  // how many there have been

// A communicator may come of the call that has one of these: until it ends, that communicator counts as alive.
class Making {
 public:
  Making();
  ~Making();
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;
};

// One operation that was called, and the stream it was called for.
struct Issue {
  CommPtr comm;
  Operation operation;
  void* stream;
};
// Launches what a group holds: one batch for each communicator, in the streams it was called for. 0 or an error.
int submit(const std::vector<Issue>& issues);

}  // namespace fake_nccl
