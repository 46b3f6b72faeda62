#include "comm/peers.h"

#include <optional>
#include <string>

namespace bucketwheel {

std::string Peers::late_text(const LastSeqs& last, uint64_t seq, const char* done) const {
  std::string late;
  std::string silent;
  for (size_t r = 0; r < last.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r);
    const std::optional<uint64_t>& reached = last[r];
    if (!reached) {
      silent += (silent.empty() ? "" : ", ") + rank;
    } else if (*reached < seq) {
      const std::string known = describe(static_cast<int>(r));
      late += (late.empty() ? "" : ", ") + rank + " (" + known + (known.empty() ? "" : ", ") + "last " + done + " " +
              std::to_string(*reached) + ")";
    }
  }
  if (late.empty() && silent.empty()) {
    return std::string(", which all ranks have ") + done;
  }
  return (late.empty() ? "" : ". Not arrived: " + late) + (silent.empty() ? "" : ". Unknown (no answer): " + silent);
}

}  // namespace bucketwheel
