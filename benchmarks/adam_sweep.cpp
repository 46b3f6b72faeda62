// The limit for an Adam step that is bound by memory: the same streams read and written in place, with next to no
// arithmetic. Compiled by bench_adam.py for the machine at hand and called through ctypes.
#include <cstdint>
#include <thread>
#include <vector>

namespace {

// Reads p, g, m, v and writes p, m, v: 28 bytes an element.
void sweep_float(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
                 int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    m[i] += g[i];
    v[i] += 1.0f;
    p[i] += 1.0f;
  }
}

// Reads g (2 bytes), master, m, v and writes all but g, with the bfloat16 p: 28 bytes an element.
void sweep_bf16(uint16_t* __restrict p, const uint16_t* __restrict g, float* __restrict m, float* __restrict v,
                float* __restrict master, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    m[i] += 1.0f;
    v[i] += 1.0f;
    master[i] += 1.0f;
    p[i] = g[i];
  }
}

}  // namespace

extern "C" void adam_sweep(void* p, const void* g, float* m, float* v, float* master, int64_t numel, int threads) {
  const auto part = [=](int64_t begin, int64_t end) {
    if (master == nullptr) {
      sweep_float(static_cast<float*>(p) + begin, static_cast<const float*>(g) + begin, m + begin, v + begin,
                  end - begin);
    } else {
      sweep_bf16(static_cast<uint16_t*>(p) + begin, static_cast<const uint16_t*>(g) + begin, m + begin, v + begin,
                 master + begin, end - begin);
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) {
    others.emplace_back(part, numel * t / threads, numel * (t + 1) / threads);
  }
  part(0, numel / threads);
  for (auto& other : others) {
    other.join();
  }
}
