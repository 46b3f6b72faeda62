#include "comm/peers/peers.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace bucketwheel {

std::string Peers::late_text(const LastSeqs& last, uint64_t seq, const char* done, const char* op) {
  std::vector<Missing> late;
  std::string silent;
  for (size_t r = 0; r < last.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r);
    const std::optional<uint64_t>& reached = last[r];
    if (!reached) {
      silent += (silent.empty() ? "" : ", ") + rank;
    } else if (*reached < seq) {
      const std::string theirs = call_of(static_cast<int>(r));
      late.push_back({static_cast<int>(r), describe(static_cast<int>(r)),
                      theirs.empty() && *reached == 0 ? "has made no call" : theirs,
                      std::string("last ") + done + " " + std::to_string(*reached), false});
    }
  }
  if (late.empty() && silent.empty()) {
    return std::string(", which all ranks have ") + done;
  }
  return (late.empty() ? "" : missing_text(late, call().current(op))) +
         (silent.empty() ? "" : ". Unknown (no answer): " + silent);
}

void Peers::tell(std::chrono::nanoseconds waited, const std::string& what, const LastSeqs& last, uint64_t seq,
                 const char* done, const char* op) {
  const auto waits = [seq](const std::optional<uint64_t>& reached) { return reached && *reached >= seq; };
  const bool is_lowest = std::ranges::find_if(last, waits) - last.begin() == health().rank();
  const std::string text = is_lowest ? call().in_call(what) + late_text(last, seq, done, op) : "";
  health().reports().tell(waited, timeout(), health().who(), text);
  forget_answers();
}

std::optional<Failure> Peers::late(std::chrono::nanoseconds waited, const std::string& what, int path, uint64_t seq,
                                   const char* done, const char* op) {
  const bool is_over = waited > timeout();
  if (!is_over && !health().reports().is_due(waited)) {
    return {};
  }
  const std::optional<LastSeqs> last = last_seqs(path);  // none: they are being asked
  if (last && is_over) {
    const std::string text = "timeout in " + call().in_call(what) + late_text(*last, seq, done, op);
    return Failure{FailureKind::kTimeout, text, -1, seq, 0, {}, *last};
  }
  if (last) {
    tell(waited, what, *last, seq, done, op);
  }
  return {};
}

}  // namespace bucketwheel
