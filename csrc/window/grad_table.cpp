#include "window/grad_table.h"

#include <algorithm>

#include "base/error.h"

namespace bucketwheel {

GradTable::GradTable(Device& device, size_t count)
    : device_(device),
      pieces_(count),
      has_sum_(count),
      zeroed_(count),
      edited_(count),
      factors_(count, 1.0),
      entries_(count, EntryState::kOne) {}

void GradTable::carry_over(const GradTable& old, std::span<const int> indices) {
  for (size_t i = 0; i < indices.size(); ++i) {
    const size_t from = at(indices[i]);
    has_sum_[i] = old.has_sum_[from];
    zeroed_[i] = old.zeroed_[from];
    factors_[i] = old.factors_[from];
    entries_[i] = old.entries_[from];
    edited_[i] = 1;  // the accumulators that have summed are gone
  }
  ++version_;
}

void GradTable::set_held(std::string_view held) {
  BW_EXPECTS(held.size() == count(),
             std::to_string(held.size()) + " flags for " + std::to_string(count()) + " parameters");
  for (size_t i = 0; i < held.size(); ++i) {
    has_sum_[i] = held[i] != 0;
    zeroed_[i] = 0;
    if (held[i] == 0) {
      set_factor(static_cast<int>(i), 1.0);
    }
  }
}

std::vector<uint8_t> GradTable::older(std::string_view held) const {
  std::vector<uint8_t> out(count());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = has_sum_[i] != 0 && zeroed_[i] == 0 && held[i] != 0;
  }
  return out;
}

void GradTable::forget(int param) {
  ++version_;
  set_factor(param, 1.0);
  has_sum_[at(param)] = 0;
}

void GradTable::forget_all() {
  ++version_;
  reset_factors();
  replace_entries(EntryState::kScaled, EntryState::kStale);
  has_sum_.assign(count(), 0);
}

void GradTable::zero(int param, Stream* stream) {
  for (const Piece& piece : pieces_[at(param)]) {
    device_.fill(piece.data, 0, static_cast<size_t>(piece.numel) * size_of(piece.dtype), stream);
  }
  mark_edited(param);
}

void GradTable::replace_by_zero(int param, Stream* stream) {
  zero(param, stream);
  zeroed_[at(param)] = 1;
  set_factor(param, 1.0);
}

void GradTable::mark_edited(int param) {
  edited_[at(param)] = 1;
  ++version_;
}

void GradTable::mark_reduced() {
  clear_edited();
  ++version_;
}

std::vector<int> GradTable::edited() const {
  std::vector<int> out;
  for (size_t i = 0; i < count(); ++i) {
    if (edited_[i] != 0 && has_sum_[i] != 0) {
      out.push_back(static_cast<int>(i));
    }
  }
  return out;
}

bool GradTable::has_factors() const {
  return std::ranges::any_of(factors_, [](double factor) { return factor != 1.0; });
}

bool GradTable::has_entries(EntryState state) const { return std::ranges::find(entries_, state) != entries_.end(); }

void GradTable::set_factor(int param, double factor) {
  factors_[at(param)] = factor;
  EntryState& entry = entries_[at(param)];
  if (entry == EntryState::kScaled || (entry == EntryState::kOne && may_be_replayed_)) {
    entry = EntryState::kStale;
  }
}

void GradTable::scale(std::span<const int> params, double factor) {
  for (const int param : params) {
    factors_[at(param)] *= factor;
  }
}

void GradTable::note_scaled(std::span<const int> params) {
  for (const int param : params) {
    entries_[at(param)] = EntryState::kScaled;
  }
}

void GradTable::replace_entries(EntryState from, EntryState to) { std::ranges::replace(entries_, from, to); }

std::vector<double> GradTable::known() const { return has_factors() ? factors_ : std::vector<double>(); }

void GradTable::set_known(std::span<const double> factors) {
  reset_factors();
  std::ranges::copy(factors, factors_.begin());
}

}  // namespace bucketwheel
