// The limit for an Adam step that is bound by memory: the same streams read and written in place, with next to no
// arithmetic, on torch's threads. Compiled by bench_adam.py for the machine at hand and called through ctypes.
#include <cstdint>

namespace {

// A block of all streams before the next block of any, small enough to stay in the first-level cache meanwhile.
constexpr int64_t kBlockNumel = 256;
constexpr int64_t kAheadNumel = 1024;

void read(const uint32_t* x, int64_t words, uint32_t& sum) {
  for (int64_t i = 0; i < words; ++i) {
    sum += x[i];
  }
}
void write(uint32_t* x, int64_t words) {
  for (int64_t i = 0; i < words; ++i) {
    x[i] = 1;
  }
}
void update(uint32_t* x, int64_t words) {
  for (int64_t i = 0; i < words; ++i) {
    x[i] += 1;
  }
}

}  // namespace

// An array of `numel` elements, read, written or (both) updated.
struct Stream {
  char* data;
  int64_t element_bytes;
  int64_t reads;
  int64_t writes;
};

// The sum keeps the compiler from leaving reads out.
extern "C" uint32_t adam_sweep(const Stream* streams, int64_t count, int64_t numel, int threads) {
  uint32_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : sum)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t blocks = numel / kBlockNumel;
    for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; ++block) {
      for (int64_t s = 0; s < count; ++s) {
        const Stream& stream = streams[s];
        char* data = stream.data + block * kBlockNumel * stream.element_bytes;
        const int64_t bytes = kBlockNumel * stream.element_bytes;
        for (int64_t line = 0; line < bytes; line += 64) {
          __builtin_prefetch(data + kAheadNumel * stream.element_bytes + line);
        }
        auto* words = reinterpret_cast<uint32_t*>(data);
        if (stream.writes == 0) {
          read(words, bytes / 4, sum);
        } else if (stream.reads == 0) {
          write(words, bytes / 4);
        } else {
          update(words, bytes / 4);
        }
      }
    }
  }
  return sum;
}
