// base/terminate: of the threads that terminate when the process ends, those sleep that were named. Run by test_native.py.
// needs: base
// runs: plain
#include "base/terminate.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <exception>
#include <functional>
#include <stdexcept>
#include <thread>

#include "check.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

constexpr int kEnded = 7;
constexpr int kHasNotRun = 8;

// How a child ends in which body() runs, in a thread that sleeps if it may; by itself after `patience`.
int end_of_child(std::chrono::seconds patience, const std::function<void()>& body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    std::atomic<bool> is_listed{false};
    std::atomic<bool> has_run{false};
    std::thread left([&] {
      sleep_until([&] { return is_listed.load(); });
      has_run = true;
      body();
    });
    let_sleep_at_terminate({left.native_handle()});
    let_sleep_at_terminate({});  // the first call counts
    is_listed = true;
    std::this_thread::sleep_for(patience);
    _exit(has_run ? kEnded : kHasNotRun);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

bool is_aborted(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT; }

TEST(threads_that_are_left_sleep) {
  if (may_fork()) {
    const int status = end_of_child(1s, [] { std::terminate(); });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == kEnded);
  }
}

TEST(others_end_the_process) {
  if (may_fork()) {
    CHECK(is_aborted(end_of_child(60s, [] { std::thread([] { std::terminate(); }).join(); })));
  }
}

TEST(what_is_thrown_ends_the_process) {
  if (may_fork()) {
    CHECK(is_aborted(end_of_child(60s, [] { throw std::runtime_error("not caught"); })));
  }
}

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv); }
