#include "comm/host/control.h"

#include <algorithm>

#include "base/align.h"
#include "base/futex.h"
#include "base/mapping.h"

namespace bucketwheel {
namespace {

constexpr size_t kRecordBytes = round_up(sizeof(RankRecord), kPageBytes);

// The records of all ranks, then the staging buffers, then the payloads: a page belongs to one rank and one purpose,
// and pages that nobody uses never exist. A page lies in the memory of the NUMA node of whoever touches it first, if only
// to read it. Of staging buffers and payloads that is the owner, who announces what is in them; of a record it may be a
// peer that looks whether the rank has come or failed.
size_t staging_at(int world) { return kRecordBytes * static_cast<size_t>(world); }
size_t payload_at(int world) {
  return staging_at(world) + Control::kStagingSlots * Control::staging_bytes(world) * static_cast<size_t>(world);
}

}  // namespace

size_t Control::staging_bytes(int world) {
  // A reduce-scatter stages a window for each peer: room for at least one block of the largest type in each.
  constexpr size_t kLeastBytes = size_t{256} << 10;
  constexpr size_t kWindowBytes = size_t{32} << 10;
  return std::max(kLeastBytes, kWindowBytes * static_cast<size_t>(world));
}

size_t Control::size_bytes(int world) { return payload_at(world) + 2 * kPayloadBytes * static_cast<size_t>(world); }

RankRecord& Control::record(int rank) const {
  return *reinterpret_cast<RankRecord*>(base_ + kRecordBytes * static_cast<size_t>(rank));
}

std::byte* Control::staging(int rank, int slot) const {
  return base_ + staging_at(world_) + staging_bytes(world_) * static_cast<size_t>(rank * kStagingSlots + slot);
}

std::byte* Control::payload(int rank, int slot) const {
  return base_ + payload_at(world_) + kPayloadBytes * static_cast<size_t>(rank * 2 + slot);
}

void ring(RankRecord& record) {
  if (record.sleepers.load() != 0) {
    record.bell.fetch_add(1);
    futex_wake_all(record.bell, FutexScope::kShared);
  }
}

}  // namespace bucketwheel
