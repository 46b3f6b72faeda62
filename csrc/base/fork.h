// Telling a forked child from its parent.
//
// Threads do not survive fork() and a lock that another thread held stays locked in the child. Objects that own a
// thread or a lock remember the generation they were made in and refuse to work in a later one.
#pragma once

#include <atomic>
#include <cstdint>

namespace bucketwheel {

// The number of fork() calls between the process that loaded the library and this one. A single load.
// The first call installs the handler that counts: objects call it when they are made.
uint64_t fork_generation();

// The process in which an object was made, as its member.
class MadeIn {
 public:
  // Here is a forked child of that process: its threads are not here, and its locks may be held for ever.
  bool is_foreign() const noexcept { return generation_ != fork_generation(); }

 private:
  const uint64_t generation_ = fork_generation();
};

// True in a process that was made by fork() and has not called exec() since, whoever had loaded the library then;
// true also where the kernel does not say (no /proc).
bool is_forked_without_exec();

// [Note: fork] A forked child would keep its parent's connections open, and so hide the parent's death from the peers.
// From here on `fd` is closed in every child at once.
void close_in_child(int fd);
// Before `fd` is closed here.
void keep_in_child(int fd);

// The process's one T, made at the first call and never freed: its threads may outlive static objects. A forked child
// gets its own, for the parent's threads and locks are not there.
template <class T>
T& per_process() {
  struct Owned {
    uint64_t generation = fork_generation();
    T value;
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* known = current.load();
  while (known == nullptr || known->generation != fork_generation()) {
    auto* const made = new Owned;
    if (current.compare_exchange_strong(known, made)) {
      return made->value;
    }
    delete made;
  }
  return known->value;
}

}  // namespace bucketwheel
