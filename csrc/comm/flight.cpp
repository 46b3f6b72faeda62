#include "comm/flight.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>

#include "base/env.h"

namespace bucketwheel {
namespace {

double seconds_of(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }
double now_s() { return seconds_of(Clock::now()); }

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

void FlightRing::issued(const Operation& op, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  last_seq_ = op.seq;
  entries_[op.seq % kCapacity] = {
      op.seq, op.collective, State::kIssued, op.segments.size(), op.size_bytes, seconds_of(now), 0, 0};
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

void FlightRing::captured(uint64_t seq) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = find(seq)) {
    entry->state = State::kCaptured;
  }
}

std::string FlightRing::json(const std::string& reason) const {
  static constexpr const char* kStates[] = {"issued", "running", "done", "failed", "captured"};
  char host[256] = "";
  (void)gethostname(host, sizeof(host) - 1);
  const double wall_s = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string out = "{\"comm\": " + quoted(identity_.comm) + ", \"rank\": " + std::to_string(identity_.rank) +
                    ", \"world\": " + std::to_string(identity_.world) + ", \"backend\": " + quoted(identity_.backend) +
                    ", \"pid\": " + std::to_string(getpid()) + ", \"host\": " + quoted(host) +
                    ", \"written_at\": " + time_text(wall_s) + ", \"now_s\": " + time_text(now_s()) +
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

void FlightRing::write(const std::string& reason) noexcept {
  if (env().trace_dir.empty()) {
    return;
  }
  try {
    std::lock_guard lock(write_mutex_);
    std::string file = identity_.comm;
    std::replace(file.begin(), file.end(), '/', '_');
    const std::string path = env().trace_dir + "/" + file + "-rank" + std::to_string(identity_.rank) + ".json";
    const std::string unfinished = path + "." + std::to_string(getpid());
    std::ofstream(unfinished) << json(reason);
    std::rename(unfinished.c_str(), path.c_str());  // readers find a whole file
    is_written_ = true;
  } catch (const std::exception&) {  // no memory, say
  }
}

}  // namespace bucketwheel
