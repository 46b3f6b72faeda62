#include "comm/flight.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <system_error>

#include "base/env.h"
#include "base/error.h"

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

// A communicator's name as part of the name of a file. The end of a long one is kept: it tells the parts of a communicator
// apart.
std::string file_text(std::string name) {
  constexpr size_t kMaxBytes = 100;
  name.erase(0, name.size() - std::min(name.size(), kMaxBytes));
  std::replace_if(name.begin(), name.end(), [](unsigned char c) { return c == '/' || c < 0x20; }, '_');
  return name;
}

// Readers find a whole file or none. Nothing is followed or changed that somebody else has put into the folder, where
// others may be allowed to write: the file is new, and for this user alone.
void write_file(const std::string& path, const std::string& text) {
  const std::string unfinished = path + "." + std::to_string(getpid());
  const int fd = open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  std::FILE* file = fd < 0 ? nullptr : fdopen(fd, "w");
  if (file == nullptr) {
    throw Error("cannot make " + unfinished + ": " + std::generic_category().message(errno));
  }
  const bool is_written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !is_written || std::rename(unfinished.c_str(), path.c_str()) != 0) {
    const std::string why = std::generic_category().message(errno);
    (void)unlink(unfinished.c_str());
    throw Error("cannot write " + path + ": " + why);
  }
}

}  // namespace

void FlightRing::issued(const Operation& op, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  last_seq_ = op.seq;
  entries_[op.seq % kCapacity] = {
      op.seq, op.collective, State::kIssued, op.pairs.size(), op.size_bytes, seconds_of(now), 0, 0};
}

void FlightRing::reach(uint64_t seq, State state) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[seq % kCapacity];
  if (entry.seq == seq) {
    entry.state = state;
    (state == State::kRunning ? entry.started_s : entry.finished_s) = now_s();
  }
}

std::string FlightRing::json(const std::string& reason) const {
  static constexpr const char* kStates[] = {"issued", "running", "done", "failed", "captured"};
  char host[256] = "";
  (void)gethostname(host, sizeof(host) - 1);
  const double wall_s = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string out = "{\"comm\": " + quoted(identity_.comm) + ", \"id\": " + quoted(identity_.id) +
                    ", \"rank\": " + std::to_string(identity_.rank) +
                    ", \"world\": " + std::to_string(identity_.world) + ", \"backend\": " + quoted(identity_.backend) +
                    ", \"pid\": " + std::to_string(getpid()) + ", \"host\": " + quoted(host) +
                    ", \"written_at\": " + std::to_string(wall_s) + ", \"now_s\": " + std::to_string(now_s()) +
                    ", \"reason\": " + quoted(reason) + ", \"operations\": [";
  std::lock_guard lock(mutex_);
  const uint64_t first = last_seq_ >= kCapacity ? last_seq_ - kCapacity + 1 : 1;
  for (uint64_t seq = first; seq <= last_seq_; ++seq) {
    const Entry& entry = entries_[seq % kCapacity];
    out += std::string(seq == first ? "" : ",") + "\n{\"seq\": " + std::to_string(entry.seq) +
           ", \"kind\": " + quoted(name_of(entry.collective)) + ", \"tensors\": " + std::to_string(entry.tensors) +
           ", \"bytes\": " + std::to_string(entry.size_bytes) +
           ", \"state\": " + quoted(kStates[static_cast<size_t>(entry.state)]) +
           ", \"issued_s\": " + std::to_string(entry.issued_s) + ", \"started_s\": " + std::to_string(entry.started_s) +
           ", \"finished_s\": " + std::to_string(entry.finished_s) + "}";
  }
  return out + "]}\n";
}

void FlightRing::write(const std::string& reason) noexcept {
  if (env().trace_dir.empty()) {
    return;
  }
  std::lock_guard lock(write_mutex_);
  try {
    const std::string file =
        file_text(identity_.comm) + "-" + file_text(identity_.id) + "-rank" + std::to_string(identity_.rank) + ".json";
    write_file(env().trace_dir + "/" + file, json(reason));
  } catch (const std::exception& error) {
    if (!has_complained_) {
      has_complained_ = true;
      std::fprintf(stderr, "[bucketwheel rank %d/%d comm '%s'] its last operations are not in BW_TRACE_DIR: %s\n",
                   identity_.rank, identity_.world, identity_.comm.c_str(), error.what());
    }
  }
  has_tried_ = true;
}

}  // namespace bucketwheel
