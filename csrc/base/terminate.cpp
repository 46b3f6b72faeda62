#include "base/terminate.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

namespace bucketwheel {
namespace {

struct Terminating {
  std::vector<pthread_t> sleepers;
  std::terminate_handler handler;  // that was there before
};

Terminating& terminating() {
  static auto* const made = new Terminating();  // never freed: threads terminate at any time
  return *made;
}

bool may_sleep() {
  const std::vector<pthread_t>& sleepers = terminating().sleepers;
  return std::current_exception() == nullptr &&
         std::any_of(sleepers.begin(), sleepers.end(),
                     [self = pthread_self()](pthread_t thread) { return pthread_equal(thread, self) != 0; });
}

[[noreturn]] void sleep_or_terminate() {
  while (may_sleep()) {
    pause();
  }
  terminating().handler();
  std::abort();  // a handler does not return
}

}  // namespace

void let_sleep_at_terminate(std::vector<pthread_t> threads) {
  if (terminating().handler == nullptr) {
    terminating() = {std::move(threads), std::get_terminate()};
    std::set_terminate(sleep_or_terminate);
  }
}

}  // namespace bucketwheel
