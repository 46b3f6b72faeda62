// Checks, a test registry and a watchdog: all that the native tests need of a framework.
#pragma once

#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

// What runs this process instead of the processor: "qemu", "valgrind"; else "".
inline std::string emulator() {
  const char* const name = std::getenv("BW_TEST_EMULATOR");
  return name == nullptr ? "" : name;
}

// qemu cannot: a child of a process with threads hangs now and then, or dies when it starts one.
inline bool may_fork() { return emulator() != "qemu"; }

// ThreadSanitizer cannot follow threads that a forked child starts.
inline bool may_start_threads_after_fork() {
#if defined(__SANITIZE_THREAD__)
  return false;
#else
  return true;
#endif
}

// Until `condition` holds; run_tests() ends what never does.
inline void sleep_until(const std::function<bool()>& condition) {
  while (!condition()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (0)

// `statement` throws `type` with a message that contains `text`.
#define CHECK_THROWS(type, text, statement)                                                        \
  do {                                                                                             \
    bool has_thrown = false;                                                                       \
    try {                                                                                          \
      statement;                                                                                   \
    } catch (const type& error) {                                                                  \
      has_thrown = true;                                                                           \
      if (std::strstr(error.what(), text) == nullptr) {                                            \
        std::fprintf(stderr, "%s:%d: message is: %s\n", __FILE__, __LINE__, error.what());         \
        std::_Exit(1);                                                                             \
      }                                                                                            \
    }                                                                                              \
    if (!has_thrown) {                                                                             \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #statement, #type); \
      std::_Exit(1);                                                                               \
    }                                                                                              \
  } while (0)

// Runs `body` in a forked child, where its checks hold, within 20 s.
template <class Body>
void in_child(Body&& body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20);
    body();
    if (emulator() == "valgrind") {  // which takes what belongs to the parent's threads for leaks of the child
      execl("/bin/true", "true", nullptr);
    }
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test>* const all = new std::vector<Test>();
  return *all;
}

#define TEST(name)                                                                        \
  static void name();                                                                     \
  [[maybe_unused]] static const int name##_added = (tests().push_back({#name, name}), 0); \
  static void name()

// Runs the tests whose name contains argv[1] (all without it), each within 300 s, which fuzzed messages may need on a
// busy machine: SIGALRM kills what hangs.
inline int run_tests(int argc, char** argv) {
  int count = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) {
      continue;
    }
    std::fprintf(stderr, "%s\n", test.name);
    alarm(300);
    try {
      test.body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: uncaught: %s\n", test.name, error.what());
      return 1;
    }
    ++count;
  }
  alarm(0);
  std::printf("%d passed\n", count);
  return count == 0 ? 1 : 0;
}
