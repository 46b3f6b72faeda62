// Outputs: what a rank writes when the data of an operation is there, the same on every backend of the CPU: its own part
// of what is gathered, sums, and what the sink is fed.
//
// [Note: sums] A reduction adds in rank order 0 ... world - 1, in float (double; integers in their own dtype, modulo its
// range), and rounds once: the result does not depend on who arrived first, nor on how the data travelled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/operation.h"

namespace bucketwheel {

// Puts a piece of what is gathered where it belongs: [Note: outputs past the cache], outputs.cpp.
void put_gathered(const Operation& op, size_t pair, void* to, const void* from, size_t bytes);
// An all-gather: this rank's own part of each full buffer, unless it is there.
void copy_own_part(const Operation& op, int rank);
// A reduce-scatter: the sums of elements [begin, begin + numel) of the shard of `pair`; sources[r] points at what
// rank r adds to the first of them, and is moved on. `begin` is a multiple of kSinkBlockNumel where there is a sink.
void store_sums(const Operation& op, size_t pair, int64_t begin, int64_t numel, std::span<const std::byte*> sources);
// The sink of an all-gather gets the full buffers.
void feed_gathered(const Operation& op);

}  // namespace bucketwheel
