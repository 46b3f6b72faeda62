// What depends on the operating system, the compiler or the processor: the only file with platform #ifdefs.
#pragma once

#if !defined(__linux__)
#error "bucketwheel's native core needs Linux (futex, memfd, pidfd)"
#endif

#include <cstddef>
#include <cstdint>

#include <dlfcn.h>

#if defined(__x86_64__)
#define BW_X86_64 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define BW_X86_64 0
#endif

#if defined(__aarch64__)
#define BW_AARCH64 1
#include <arm_acle.h>
#else
#define BW_AARCH64 0
#endif

// In front of a function in a header that kernels share. Inlining is forced: otherwise a translation unit compiled for
// AVX-512 could leave a copy that the linker picks for everybody (one definition rule).
#define BW_FORCE_INLINE inline __attribute__((always_inline))

// The same, for a function that the CUDA kernels share too.
#if defined(__CUDACC__)
#define BW_HD __host__ __device__ __forceinline__
#else
#define BW_HD BW_FORCE_INLINE
#endif

// In front of a loop whose iterations touch only element i of each array. Two arrays may be the same or disjoint, but
// not overlap otherwise. (__restrict__ would forbid the same.)
#define BW_ELEMENTWISE _Pragma("GCC ivdep")

// 1 where fma is an instruction of the instruction set that this file is compiled for, 0 where it is a slow function.
#if defined(__FMA__) || BW_AARCH64
#define BW_FAST_FMA 1
#else
#define BW_FAST_FMA 0
#endif

namespace bucketwheel {

// False where a .cu file is compiled by a C++ compiler against an emulation of CUDA (tests).
#if defined(__CUDACC__)
inline constexpr bool kIsCompiledByNvcc = true;
#else
inline constexpr bool kIsCompiledByNvcc = false;
#endif

// The flag of dlopen for a library that must see its own symbols before those of the process. Sanitizers refuse it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kDeepBind = 0;
#else
inline constexpr int kDeepBind = RTLD_DEEPBIND;
#endif

// For the body of a spin loop.
inline void cpu_relax() {
#if BW_X86_64
  _mm_pause();
#elif BW_AARCH64
  asm volatile("yield");
#endif
}

// Stores an aligned line of 64 bytes past the cache, by the widest stores of the instruction set that this file is
// compiled for. fence_past_cache() orders such stores before all that follow.
BW_FORCE_INLINE void store_line_past_cache(void* to, const void* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  const auto* source = static_cast<const __m256i*>(from);
  _mm256_stream_si256(static_cast<__m256i*>(to), _mm256_loadu_si256(source));
  _mm256_stream_si256(static_cast<__m256i*>(to) + 1, _mm256_loadu_si256(source + 1));
#elif BW_X86_64
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
  }
#else
  __builtin_memcpy(to, from, 64);
#endif
}
BW_FORCE_INLINE void fence_past_cache() {
#if BW_X86_64
  _mm_sfence();
#endif
}

// 1 where the instruction set that this file is compiled for has a step of CRC32C: `crc`, then 8 bytes or one.
#if defined(__SSE4_2__)
#define BW_HAS_CRC32C 1
BW_FORCE_INLINE uint32_t crc32c_word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
BW_FORCE_INLINE uint32_t crc32c_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#elif defined(__ARM_FEATURE_CRC32)
#define BW_HAS_CRC32C 1
BW_FORCE_INLINE uint32_t crc32c_word(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
BW_FORCE_INLINE uint32_t crc32c_byte(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
#else
#define BW_HAS_CRC32C 0
#endif

// While alive, this thread computes as IEEE 754 says: round to nearest even, denormals kept. A thread inherits its
// mode from the thread that started it, and torch.set_flush_denormal() changes one thread only. Without this, a result
// would depend on which thread computed it.
class IeeeFloats {
 public:
#if BW_X86_64
  IeeeFloats() : saved_(_mm_getcsr()) {
    if ((saved_ & kControl) != kDefault) {
      _mm_setcsr(kDefault);
    }
  }
  ~IeeeFloats() {
    if ((saved_ & kControl) != kDefault) {
      _mm_setcsr(saved_);
    }
  }

 private:
  static constexpr uint32_t kControl = 0xffc0;  // without the sticky exception flags
  static constexpr uint32_t kDefault = 0x1f80;  // every exception masked, nearest even, no flush to zero
  uint32_t saved_;
#elif BW_AARCH64
  IeeeFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~IeeeFloats() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif

 public:
  IeeeFloats(const IeeeFloats&) = delete;
  IeeeFloats& operator=(const IeeeFloats&) = delete;
};

// Whether the kernels for AVX2 and AVX-512 are part of the binary (csrc/sources.txt: only=x86_64).
inline constexpr bool kHasX86Kernels = BW_X86_64 != 0;

// Instruction sets the kernels are compiled for, worst first.
enum class Isa : uint8_t { kPlain, kAvx2, kAvx512 };

// The best one that this processor and its operating system run.
inline Isa processor_isa() {
#if BW_X86_64
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // f16c by hand: not every compiler knows its name
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return Isa::kAvx512;
    }
    return Isa::kAvx2;
  }
#endif
  return Isa::kPlain;
}

}  // namespace bucketwheel
