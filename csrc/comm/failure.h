// Failure: why a communicator cannot go on. Health: whether it can, and if not, the error that every caller gets.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/fork.h"
#include "comm/public_call.h"

namespace bucketwheel {

enum class FailureKind : uint32_t { kNone, kAborted, kPeer, kTimeout, kMismatch, kError, kClosed };

// Thrown inside comm/ only; Health turns it into the error that callers see.
struct Failure {
  FailureKind kind;
  std::string text;
  int rank = -1;      // kPeer: who died or left; kAborted: who aborted; kError: whose error it is; -1: nobody's
  uint64_t seq = 0;   // operations before this one are not affected; 0: all are
  int nccl_code = 0;  // kError, as the next: of CommFacts
  std::string last_error{};
  LastSeqs last_seqs{};  // kTimeout
};

// `error` as the failure of `rank`.
Failure failure_of(const std::exception& error, int rank, uint64_t seq);

// What a communicator was doing when it failed.
struct FailedAt {
  uint64_t seq = 0;
  const char* op = "";  // empty: nothing that has the number `seq`
  std::string part{};   // of the name
};

// Of an operation `seq` of the communicator that `who` says: "[bucketwheel rank r/w comm 'name' seq n] ".
inline std::string prefix_of(const std::string& who, uint64_t seq) {
  return "[bucketwheel " + who + " seq " + std::to_string(seq) + "] ";
}

// 16 hexadecimal digits of the system's randomness.
std::string random_id();

class Health {
 public:
  // `id` tells the communicator from others of its name, also of other processes; the same on all ranks. Empty: one is
  // made up, which does for a single rank.
  Health(std::string name, int rank, int world, std::string id);

  const std::string& name() const { return name_; }
  const std::string& id() const { return id_; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  // "rank r/w comm 'name'"; `part` is appended to the name.
  std::string who(const std::string& part = "") const;
  std::string prefix(uint64_t seq, const std::string& part = "") const { return prefix_of(who(part), seq); }

  void set_last_seq(uint64_t seq) { last_seq_ = seq; }  // for messages
  uint64_t last_seq() const { return last_seq_; }
  Reports& reports() { return reports_; }
  // Throws the error; ClosedError after start_closing(); DeviceError in a forked child.
  void expect_usable() const;
  bool is_forked() const { return process_.is_foreign(); }  // the communicator is the parent process's

  struct Verdict {
    std::exception_ptr error;
    std::string message;
    bool is_first = false;
  };
  // Makes `failure` the error, its message behind the prefix of `at`, unless there is one. Returns the error that stands.
  Verdict fail(const Failure& failure, const FailedAt& at);
  bool has_failed() const { return has_failed_; }
  std::exception_ptr error() const;  // null while healthy
  std::string message() const;       // of the error

  void start_closing() { is_closing_ = true; }
  bool is_closing() const { return is_closing_; }

 private:
  const std::string name_;
  const int rank_;
  const int world_;
  const std::string id_;
  const MadeIn process_;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  std::string message_;
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_closing_{false};
  std::atomic<uint64_t> last_seq_{0};
  Reports reports_;
};

}  // namespace bucketwheel
