// The script of the fake: what the next calls do, and what was called. Contract: fake_nccl.h.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "comm/nccl/api.h"
#include "fake_nccl.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

// What is defined has to have these signatures.
namespace bucketwheel {
#define FAKE_DECLARE(name, symbol, returns, parameters) FAKE_EXPORT returns symbol parameters;
BW_NCCL_REQUIRED(FAKE_DECLARE)
BW_NCCL_OPTIONAL(FAKE_DECLARE)
#undef FAKE_DECLARE
}  // namespace bucketwheel

namespace fake_nccl {

// False: `stop` came true first. Polls: the peers may be processes, and fewer processors may be there than ranks.
template <class Done, class Stop>
bool wait_until(Done done, Stop stop) {
  for (int tries = 0; !done(); ++tries) {
    if (stop()) {
      return false;
    }
    if (tries < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

// Counts a call, and does what the script says: the error that it returns instead of being made, else 0.
int enter(const char* function, const std::function<bool()>& is_stopped = [] { return false; });
// Returns `code` with this text for ncclGetLastError: of the calling thread, where ranks are threads; a thread that has
// seen no failure is told the process's last one.
int fail(int code, const std::string& text);

uint64_t releases();  // calls of fake_nccl_release() and fake_nccl_reset() so far
bool next_operation_hangs();
int async_error_of_script();
bool are_windows_null();
int version();
void note_config(const bucketwheel::NcclConfig& config);

// Device work of one communicator is in progress while this is alive.
class InProgress {
 public:
  InProgress();
  ~InProgress();
  InProgress(const InProgress&) = delete;
  InProgress& operator=(const InProgress&) = delete;
};

bool counts_only();
int launch(void* stream, void (*function)(void*), void* argument);
bool is_capturing(void* stream);

}  // namespace fake_nccl
