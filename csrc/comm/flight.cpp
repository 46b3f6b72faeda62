#include "comm/flight.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace bucketwheel {
namespace {

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned char>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string time_text(double seconds) {
  if (seconds == 0) {
    return "null";
  }
  char text[40];
  std::snprintf(text, sizeof(text), "%.6f", seconds);
  return text;
}

}  // namespace

FlightRing::Entry* FlightRing::find(uint64_t seq) {
  Entry& entry = entries_[seq % kCapacity];
  return entry.seq == seq ? &entry : nullptr;
}

void FlightRing::issued(const Operation& op) {
  std::lock_guard lock(mutex_);
  last_seq_ = op.seq;
  entries_[op.seq % kCapacity] = {op.seq, op.collective, State::kIssued, op.segments.size(), op.size_bytes, now_s(), 0,
                                  0};
}

void FlightRing::started(uint64_t seq) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(seq)) {
    entry->state = State::kRunning;
    entry->started_s = now_s();
  }
}

void FlightRing::finished(uint64_t seq, bool is_ok) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(seq)) {
    entry->state = is_ok ? State::kDone : State::kFailed;
    entry->finished_s = now_s();
  }
}

std::string FlightRing::json(const std::string& comm, int rank, int world, const char* backend,
                             const std::string& reason) const {
  static constexpr const char* kStates[] = {"issued", "running", "done", "failed"};
  std::string out = "{\"comm\": " + quoted(comm) + ", \"rank\": " + std::to_string(rank) +
                    ", \"world\": " + std::to_string(world) + ", \"backend\": " + quoted(backend) +
                    ", \"reason\": " + quoted(reason) + ", \"operations\": [";
  std::lock_guard lock(mutex_);
  const uint64_t first = last_seq_ >= kCapacity ? last_seq_ - kCapacity + 1 : 1;
  for (uint64_t seq = first; seq <= last_seq_; ++seq) {
    const Entry& entry = entries_[seq % kCapacity];
    out += std::string(seq == first ? "" : ",") + "\n{\"seq\": " + std::to_string(entry.seq) +
           ", \"kind\": " + quoted(name_of(entry.collective)) + ", \"tensors\": " + std::to_string(entry.tensors) +
           ", \"bytes\": " + std::to_string(entry.size_bytes) +
           ", \"state\": " + quoted(kStates[static_cast<size_t>(entry.state)]) +
           ", \"issued_s\": " + time_text(entry.issued_s) + ", \"started_s\": " + time_text(entry.started_s) +
           ", \"finished_s\": " + time_text(entry.finished_s) + "}";
  }
  return out + "]}\n";
}

}  // namespace bucketwheel
