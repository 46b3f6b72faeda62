#include "base/terminate.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace bucketwheel {
namespace {

std::terminate_handler before = nullptr;
pthread_t ends_the_process;

[[noreturn]] void sleep_or_terminate() {
  while (std::current_exception() == nullptr && pthread_equal(pthread_self(), ends_the_process) == 0) {
    pause();
  }
  before();
  std::abort();  // a handler does not return
}

}  // namespace

void let_others_sleep_at_terminate() noexcept {
  if (before == nullptr) {
    ends_the_process = pthread_self();
    before = std::get_terminate();
    std::set_terminate(sleep_or_terminate);
  }
}

}  // namespace bucketwheel
