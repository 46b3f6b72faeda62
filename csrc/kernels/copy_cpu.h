// Copies past the cache.
// Compiled once per instruction set: [Note: one copy per instruction set] in cpu_kernels_isa.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/platform.h"

namespace bucketwheel {
namespace {

void copy_past_cache(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  const size_t to_line = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  const size_t head = to_line < bytes ? to_line : bytes;
  __builtin_memcpy(target, source, head);
  const size_t body = (bytes - head) / kLine * kLine;
  for (size_t i = head; i < head + body; i += kLine) {
    store_line_past_cache(target + i, source + i);
  }
  fence_past_cache();
  __builtin_memcpy(target + head + body, source + head + body, bytes - head - body);
}

}  // namespace
}  // namespace bucketwheel
