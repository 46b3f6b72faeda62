// Stacks that one thread of the host switches between, known to the sanitizers.
#pragma once

#include <sys/mman.h>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fake_cuda {

#if defined(__x86_64__)
// swapcontext() asks the kernel for the signal mask at every switch, which takes ten times as long as all the rest.
extern "C" void fake_cuda_switch(void** from, void* to);
asm(R"(
.pushsection .text
.weak fake_cuda_switch
.type fake_cuda_switch, @function
fake_cuda_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fake_cuda_switch, . - fake_cuda_switch
.popsection
)");
#endif

class Stack {
 public:
  static constexpr size_t kBytes = 256 * 1024;

  // The stack that the host's thread came with: see adopt_host().
  Stack() = default;

  // A new one, on which `start`, which never returns, begins when it is entered first.
  explicit Stack(void (*start)()) {
    void* memory = mmap(nullptr, kBytes + kGuardBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
      std::perror("a stack for a thread of a kernel");
      std::abort();
    }
    memory_ = memory;
    bottom_ = static_cast<std::byte*>(memory) + kGuardBytes;
    bytes_ = kBytes;
    start_ = start;
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(static_cast<std::byte*>(memory) + kGuardBytes + kBytes) - 2;
    top[1] = nullptr;  // where `first` would return to
    top[0] = reinterpret_cast<void*>(&Stack::first);
    context_ = static_cast<void*>(top - 6);  // six registers
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = static_cast<std::byte*>(memory) + kGuardBytes;
    context_.uc_stack.ss_size = kBytes;
    makecontext(&context_, &Stack::first, 0);
#endif
#if defined(__SANITIZE_THREAD__)
    fiber_ = __tsan_create_fiber(0);
#endif
  }

  ~Stack() {
    if (memory_ != nullptr) {
#if defined(__SANITIZE_ADDRESS__)
      __asan_unpoison_memory_region(bottom_, bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
      __tsan_destroy_fiber(fiber_);
#endif
      munmap(memory_, kBytes + kGuardBytes);
    }
  }

  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  // The calling thread runs on its own stack now, and this stands for it.
  void adopt_host() {
    current_ = this;
#if defined(__SANITIZE_THREAD__)
    fiber_ = __tsan_get_current_fiber();
#endif
  }

  static Stack* current() { return current_; }

  // Goes on there; returns when somebody enters the stack that is current now.
  void enter() {
    Stack* const from = current_;
    previous_ = from;
    current_ = this;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->fake_stack_, bottom_, bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fiber_, 0);
#endif
#if defined(__x86_64__)
    fake_cuda_switch(&from->context_, context_);
#else
    swapcontext(&from->context_, &context_);
#endif
    from->arrived();
  }

 private:
  static constexpr size_t kGuardBytes = 4096;

  // On this stack, after every switch to it.
  void arrived() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, &previous_->bottom_, &previous_->bytes_);
#endif
  }

  static void first() {
    current_->arrived();
    current_->start_();
    std::abort();
  }

  inline static constinit thread_local Stack* current_ = nullptr;
  inline static constinit thread_local Stack* previous_ = nullptr;  // of the last switch

  void* memory_ = nullptr;
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  void (*start_)() = nullptr;
#if defined(__x86_64__)
  void* context_ = nullptr;
#else
  ucontext_t context_{};
#endif
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* fiber_ = nullptr;
};

}  // namespace fake_cuda
