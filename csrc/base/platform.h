// What depends on the operating system, the compiler or the processor: the only file with platform #ifdefs.
#pragma once

#if !defined(__linux__)
#error "bucketwheel's native core needs Linux (futex, memfd, pidfd)"
#endif

#if defined(__x86_64__)
#define BW_X86_64 1
#include <immintrin.h>
#else
#define BW_X86_64 0
#endif

#if defined(__aarch64__)
#define BW_AARCH64 1
#else
#define BW_AARCH64 0
#endif

namespace bucketwheel {

// For the body of a spin loop.
inline void cpu_relax() {
#if BW_X86_64
  _mm_pause();
#elif BW_AARCH64
  asm volatile("yield");
#endif
}

}  // namespace bucketwheel
