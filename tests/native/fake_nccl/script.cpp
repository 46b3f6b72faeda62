#include "script.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using bucketwheel::NcclConfig;

namespace fake_nccl {
namespace {

struct Failure {
  std::string function;
  uint64_t countdown;
  int result;
};

// Calls by function, counted without a lock: what the host pays for an operation is measured through this library.
// One text may have several places in memory, and then several counts.
class CallCounts {
 public:
  void add(const char* function) {
    for (size_t i = reinterpret_cast<uintptr_t>(function) / 8 % kSize;; i = (i + 1) % kSize) {
      const char* found = counts_[i].function.load(std::memory_order_acquire);
      if (found == nullptr && counts_[i].function.compare_exchange_strong(found, function)) {
        found = function;
      }
      if (found == function) {
        counts_[i].calls.fetch_add(1, std::memory_order_relaxed);
        return;
      }
    }
  }
  uint64_t of(const std::string& function) const {
    uint64_t sum = 0;
    for (const Count& count : counts_) {
      const char* const name = count.function;
      sum += name != nullptr && name == function ? count.calls.load() : 0;
    }
    return sum;
  }
  void clear() {
    for (Count& count : counts_) {
      count.calls = 0;
    }
  }

 private:
  static constexpr size_t kSize = 256;  // more than there are functions
  struct Count {
    std::atomic<const char*> function{nullptr};
    std::atomic<uint64_t> calls{0};
  };
  Count counts_[kSize];
};

struct Script {
  CallCounts calls;
  std::atomic<bool> has_plans{false};  // of the next two
  std::mutex mutex;
  std::vector<Failure> failures;
  std::vector<std::string> hanging_calls;
  uint64_t releases = 0;
  std::string last_error;
  NcclConfig config;

  std::atomic<uint64_t> hang_countdown{0};
  std::atomic<int (*)(void*, void (*)(void*), void*)> launch{nullptr};
  std::atomic<int (*)(void*)> is_capturing{nullptr};

  std::atomic<bool> counts_only{false};

  std::atomic<uint64_t> blocked_calls{0};
  std::atomic<int> async_error{0};
  std::atomic<bool> are_windows_null{false};
  std::atomic<int> version{0};
  std::atomic<uint64_t> in_progress{0};
  std::atomic<uint64_t> max_in_progress{0};
};
Script& script() {
  static auto* const one = new Script();  // never freed: streams may outlive static objects
  return *one;
}

thread_local std::string text_of_thread;

}  // namespace

uint64_t releases() {
  std::lock_guard lock(script().mutex);
  return script().releases;
}

int enter(const char* function, const std::function<bool()>& is_stopped) {
  Script& the = script();
  the.calls.add(function);
  if (!the.has_plans) {
    return 0;
  }
  bool hangs = false;
  uint64_t before = 0;
  int result = 0;
  {
    std::lock_guard lock(the.mutex);
    before = the.releases;
    const auto hanging = std::find(the.hanging_calls.begin(), the.hanging_calls.end(), function);
    if (hanging != the.hanging_calls.end()) {
      the.hanging_calls.erase(hanging);
      hangs = true;
    }
    for (auto it = the.failures.begin(); it != the.failures.end();) {
      if (it->function == function && --it->countdown == 0) {
        result = it->result;
        it = the.failures.erase(it);
      } else {
        ++it;
      }
    }
    the.has_plans = !the.failures.empty() || !the.hanging_calls.empty();
  }
  if (hangs) {
    ++the.blocked_calls;
    wait_until([&] { return releases() != before; }, is_stopped);
    --the.blocked_calls;
  }
  return result == 0 ? 0 : fail(result, std::string("the script lets ") + function + " fail");
}

int fail(int code, const std::string& text) {
  text_of_thread = text;
  std::lock_guard lock(script().mutex);
  script().last_error = text;
  return code;
}

bool next_operation_hangs() {
  if (script().hang_countdown == 0) {
    return false;
  }
  std::lock_guard lock(script().mutex);
  if (script().hang_countdown == 0) {
    return false;
  }
  return --script().hang_countdown == 0;
}
int async_error_of_script() { return script().async_error; }
bool are_windows_null() { return script().are_windows_null; }
int version() {
  if (script().version == 0) {
    const char* const text = std::getenv("FAKE_NCCL_VERSION");
    script().version = text == nullptr ? 23007 : std::stoi(text);
  }
  return script().version;
}
void note_config(const NcclConfig& config) {
  std::lock_guard lock(script().mutex);
  script().config = config;
  script().config.comm_name = nullptr;
}

InProgress::InProgress() {
  const uint64_t now = ++script().in_progress;
  uint64_t most = script().max_in_progress;
  while (now > most && !script().max_in_progress.compare_exchange_weak(most, now)) {
  }
}
InProgress::~InProgress() { --script().in_progress; }

bool counts_only() { return script().counts_only.load(std::memory_order_relaxed); }

int launch(void* stream, void (*function)(void*), void* argument) {
  if (const auto hook = script().launch.load()) {
    return hook(stream, function, argument);
  }
  function(argument);
  return 0;
}
bool is_capturing(void* stream) {
  const auto hook = script().is_capturing.load();
  return hook != nullptr && hook(stream) != 0;
}

}  // namespace fake_nccl

using fake_nccl::script;

FAKE_EXPORT void fake_nccl_set_launch(int (*launch)(void*, void (*)(void*), void*), int (*is_capturing)(void*)) {
  script().launch = launch;
  script().is_capturing = is_capturing;
}
FAKE_EXPORT void fake_nccl_count_only(int counts_only) { script().counts_only = counts_only != 0; }
FAKE_EXPORT void fake_nccl_fail(const char* function, uint64_t countdown, int result) {
  std::lock_guard lock(script().mutex);
  script().failures.push_back({function, countdown, result});
  script().has_plans = true;
}
FAKE_EXPORT void fake_nccl_hang(uint64_t countdown) { script().hang_countdown = countdown; }
FAKE_EXPORT void fake_nccl_hang_call(const char* function) {
  std::lock_guard lock(script().mutex);
  script().hanging_calls.emplace_back(function);
  script().has_plans = true;
}
FAKE_EXPORT void fake_nccl_release() {
  std::lock_guard lock(script().mutex);
  ++script().releases;
}
FAKE_EXPORT uint64_t fake_nccl_hanging_calls() { return script().blocked_calls; }
FAKE_EXPORT void fake_nccl_async_error(int code) { script().async_error = code; }
FAKE_EXPORT void fake_nccl_null_windows(int are_null) { script().are_windows_null = are_null != 0; }
FAKE_EXPORT uint64_t fake_nccl_calls(const char* function) { return script().calls.of(function); }
FAKE_EXPORT uint64_t fake_nccl_max_concurrent() { return script().max_in_progress; }
FAKE_EXPORT int fake_nccl_last_config(const char* member) {
  std::lock_guard lock(script().mutex);
  const NcclConfig& config = script().config;
  const std::map<std::string, int> members = {{"blocking", config.blocking},
                                              {"max_ctas", config.max_ctas},
                                              {"split_share", config.split_share},
                                              {"cta_policy", config.cta_policy}};
  const auto found = members.find(member);
  return found == members.end() ? bucketwheel::kNcclUndefined : found->second;
}
FAKE_EXPORT void fake_nccl_reset() {
  std::lock_guard lock(script().mutex);
  script().calls.clear();
  script().failures.clear();
  script().hanging_calls.clear();
  script().has_plans = false;
  ++script().releases;
  script().hang_countdown = 0;
  script().last_error.clear();
  fake_nccl::text_of_thread.clear();
  script().async_error = 0;
  script().are_windows_null = false;
  script().counts_only = false;
  script().max_in_progress = script().in_progress.load();
}

namespace bucketwheel {

FAKE_EXPORT const char* ncclGetLastError(NcclCommRef) {
  thread_local std::string copy;  // the text may change while the caller reads it
  std::lock_guard lock(script().mutex);
  copy = fake_nccl::text_of_thread.empty() ? script().last_error : fake_nccl::text_of_thread;
  return copy.c_str();
}
FAKE_EXPORT const char* ncclGetErrorString(int result) {
  static constexpr const char* kTexts[] = {"no error",       "unhandled cuda error", "unhandled system error",
                                           "internal error", "invalid argument",     "invalid usage",
                                           "remote error",   "in progress",          "timeout"};
  return result < 0 || result > 8 ? "unknown result code" : kTexts[result];
}
FAKE_EXPORT int ncclGetVersion(int* to) {
  if (const int error = fake_nccl::enter("ncclGetVersion")) {
    return error;
  }
  if (to == nullptr) {
    return fake_nccl::fail(kNcclInvalidArgument, "ncclGetVersion: version is null");
  }
  *to = fake_nccl::version();
  return kNcclSuccess;
}

}  // namespace bucketwheel
