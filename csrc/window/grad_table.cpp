#include "window/grad_table.h"

#include <algorithm>

#include "base/error.h"

namespace bucketwheel {

GradTable::GradTable(Device& device, size_t count)
    : device(device),
      pieces(count),
      sums(count),
      zeroed(count),
      edited(count),
      factors(count, 1.0),
      entries(count, EntryState::kOne) {}

void GradTable::carry_over(const GradTable& old, std::span<const int> indices) {
  for (size_t i = 0; i < indices.size(); ++i) {
    const size_t from = at(indices[i]);
    sums[i] = old.sums[from];
    zeroed[i] = old.zeroed[from];
    factors[i] = old.factors[from];
    entries[i] = old.entries[from];
    edited[i] = 1;  // the accumulators that have summed are gone
  }
  ++version;
}

void GradTable::set_held(std::span<const uint8_t> held) {
  BW_EXPECTS(held.size() == sums.size(), "held must have one flag for each parameter");
  sums.assign(held.begin(), held.end());
  zeroed.assign(held.size(), 0);
  for (size_t i = 0; i < held.size(); ++i) {
    if (held[i] == 0) {
      set_factor(static_cast<int>(i), 1.0);
    }
  }
}

std::vector<uint8_t> GradTable::older(std::string_view held) const {
  std::vector<uint8_t> out(held.size());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = sums[i] != 0 && zeroed[i] == 0 && held[i] != 0;
  }
  return out;
}

void GradTable::forget(int param) {
  ++version;
  set_factor(param, 1.0);
  sums[at(param)] = 0;
}

void GradTable::forget_all() {
  ++version;
  factors.assign(factors.size(), 1.0);
  std::ranges::replace(entries, EntryState::kScaled, EntryState::kStale);
  sums.assign(sums.size(), 0);
}

void GradTable::zero(int param, Stream* stream) {
  for (const Piece& piece : pieces[at(param)]) {
    device.fill(piece.data, 0, piece.size_bytes, stream);
  }
  mark_edited(param);
}

void GradTable::mark_edited(int param) {
  edited[at(param)] = 1;
  ++version;
}

void GradTable::mark_reduced() {
  edited.assign(edited.size(), 0);
  ++version;
}

void GradTable::set_factor(int param, double factor) {
  factors[at(param)] = factor;
  EntryState& entry = entries[at(param)];
  if (entry == EntryState::kScaled || (entry == EntryState::kOne && may_be_replayed)) {
    entry = EntryState::kStale;
  }
}

}  // namespace bucketwheel
