#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace bucketwheel {
namespace {

std::atomic<uint64_t> forks{0};

struct ClosedInChild {
  std::mutex mutex;
  std::vector<int> fds;
};

ClosedInChild& closed_in_child() {
  // Never freed: fork() may be called at any time.
  static ClosedInChild* const registered = [] {
    auto* made = new ClosedInChild();
    pthread_atfork([] { closed_in_child().mutex.lock(); }, [] { closed_in_child().mutex.unlock(); },
                   [] {
                     for (const int fd : closed_in_child().fds) {
                       ::close(fd);
                     }
                     closed_in_child().fds.clear();
                     closed_in_child().mutex.unlock();
                   });
    return made;
  }();
  return *registered;
}

}  // namespace

void close_in_child(int fd) {
  std::lock_guard lock(closed_in_child().mutex);
  closed_in_child().fds.push_back(fd);
}

void keep_in_child(int fd) {
  std::lock_guard lock(closed_in_child().mutex);
  std::erase(closed_in_child().fds, fd);
}

uint64_t fork_generation() {
  // By the first caller, before any object that compares generations exists.
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  return forks.load(std::memory_order_relaxed);
}

bool is_forked_without_exec() {
  std::ifstream stat("/proc/self/stat");
  std::string line;
  std::getline(stat, line);
  // Field 9, flags, of which proc(5) says that they are the kernel's PF_*; field 2, a name, ends at the last
  // parenthesis.
  constexpr unsigned kForkNoExec = 0x40;
  std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 1)));
  std::string skipped;
  unsigned flags = 0;
  for (int field = 3; field < 9; ++field) {
    fields >> skipped;
  }
  return !(fields >> flags) || (flags & kForkNoExec) != 0;
}

}  // namespace bucketwheel
