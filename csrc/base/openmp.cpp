#include "base/openmp.h"

#include <dlfcn.h>

#include "base/fork.h"

namespace bucketwheel {
namespace {

template <class Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// What `#pragma omp parallel` compiles to. GNU's, LLVM's and Intel's runtimes all have it.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);
  int (*thread_num)();
  bool was_forked;  // by the first call; forks from there on are counted

  OpenMp()
      : parallel(find<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel")),
        thread_num(find<int()>("omp_get_thread_num")),
        was_forked(fork_generation() != 0 || is_forked_without_exec()) {}

  bool has_team() const {
    return parallel != nullptr && thread_num != nullptr && !was_forked && fork_generation() == 0;
  }
};

struct Call {
  void (*function)(void* context, int thread);
  void* context;
  int (*thread_num)();
};

}  // namespace

bool run_on_openmp_team(int threads, void (*function)(void* context, int thread), void* context) {
  static const OpenMp openmp;
  if (!openmp.has_team()) {
    return false;
  }
  Call call = {function, context, openmp.thread_num};
  openmp.parallel(
      [](void* data) {
        const Call& of = *static_cast<const Call*>(data);
        of.function(of.context, of.thread_num());
      },
      &call, static_cast<unsigned>(threads), 0);
  return true;
}

}  // namespace bucketwheel
