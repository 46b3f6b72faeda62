// PublicCall: the call that a rank is in, or has finished last, by its public name. Reports: when a wait is told to stderr.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace bucketwheel {

// [Note: who is missing] A wait for other ranks is told to stderr after 10, 20, 40 s and so on, and the error at its end
// says the same: which ranks are missing, what this rank has called, and what each of those has called last.
//   - Python names a call at its public entry (PublicCall of bindings/comm_py.h). Of nested calls the outermost counts.
//   - On one host the name lies in the rank's record of the control segment. Between hosts the rank's progress key has it.
//   - The line is written where the wait is, without the GIL, by the lowest of the ranks that wait: a log gets one line for
//     each communicator and time, and rank 0's log gets it unless rank 0 is missing.

// Plain data of a control segment, zero at first. One rank writes, all ranks read; a text that is read while it changes may
// be a mixture of two.
class PublicCall {
 public:
  void enter(std::string_view name);
  void leave() { --depth_; }
  // "is in optimizer.step", "has finished optimizer.step"; empty: there was no call.
  std::string text() const;
  // The call that the rank is in; `otherwise`: in none.
  std::string current(const std::string& otherwise) const { return depth_ == 0 ? otherwise : name(); }
  // `what`, behind the call that the rank is in.
  std::string in_call(const std::string& what) const { return depth_ == 0 ? what : name() + " (" + what + ")"; }

 private:
  std::string name() const;
  std::atomic<uint32_t> depth_;
  std::array<std::atomic<char>, 124> name_;
};

// A rank that others wait for.
struct Missing {
  int rank;
  std::string who;   // "pid 1234"
  std::string call;  // PublicCall::text(), or what is known instead
  std::string last;  // "last issued 117"
  bool is_in_it;     // it has called what the others wait in, and has not come as far as they have
};
// ". Not arrived: rank 1 (pid 1234, has finished optimizer.step, has not called bw.checkpoint.save, last issued 117): call it
// on all ranks". `call`: what this rank has called.
std::string missing_text(std::span<const Missing> missing, const std::string& call);

// The reports of all waits of a communicator: of one, or of several at once, after 10, 20, 40 s and so on. Thread-safe.
class Reports {
 public:
  void set_first(std::chrono::nanoseconds first) { first_ns_ = first.count(); }
  // Whether a wait that has lasted so long is to be told.
  bool is_due(std::chrono::nanoseconds waited) const;
  // Tells it: one line for `who` about the wait for `what`, which ends after `limit`. Nothing where `what` is empty, or
  // where another wait has just told it.
  void tell(std::chrono::nanoseconds waited, std::chrono::nanoseconds limit, const std::string& who,
            const std::string& what);

 private:
  std::atomic<int64_t> first_ns_{10'000'000'000};
  std::atomic<int64_t> last_ns_{0};  // when tell() was called, on the steady clock
};

}  // namespace bucketwheel
