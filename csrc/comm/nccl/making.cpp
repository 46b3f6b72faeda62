// How an NcclComm comes to be: made, as one of a pair, by splitting another, or around a borrowed one.
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/nccl/comm.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::microseconds kPoll{100};

NcclSettings settings_of(const NcclOptions& options, const std::string& name) {
  return {options.config, "bw/" + name, options.net_name, options.poll};
}

}  // namespace

NcclComm::Ref NcclComm::around(const PeersRef& peers, const std::shared_ptr<NcclSession>& session,
                               const std::string& part, const NcclOptions& options, std::shared_ptr<Turn> turn) {
  try {
    return Ref(new NcclComm(peers, session, part, options, std::move(turn)));
  } catch (...) {
    session->abort();
    throw;
  }
}

NcclComm::Ref NcclComm::make(const PeersRef& peers, int device, const NcclUniqueId& id, const NcclOptions& options,
                             Deadline deadline) {
  const Health& health = peers->health();
  auto session = NcclSession::make(nccl_api(), device, id, health.rank(), health.world(),
                                   settings_of(options, health.name()), {}, deadline);
  return around(peers, session, "", options, nullptr);
}

std::pair<NcclComm::Ref, NcclComm::Ref> NcclComm::pair(const PeersRef& peers, int device, const NcclUniqueId& id,
                                                       const NcclOptions& options, Deadline deadline) {
  const Health& health = peers->health();
  // Shared resources would put the two in one order; NCCL asks the parent's config, not the child's.
  NcclOptions unshared = options;
  unshared.config.split_share = 0;
  const auto gathers = NcclSession::make(nccl_api(), device, id, health.rank(), health.world(),
                                         settings_of(unshared, health.name() + "/ag"), {true, false}, deadline);
  std::shared_ptr<NcclSession> reduces;
  try {
    reduces = gathers->split(0, health.rank(), settings_of(unshared, health.name() + "/rs"), {false, true}, deadline);
  } catch (...) {
    gathers->abort();
    throw;
  }
  auto turn = options.serialises ? std::make_shared<Turn>() : nullptr;
  try {
    auto first = around(peers, gathers, "/ag", options, turn);
    return {std::move(first), around(peers, reduces, "/rs", options, turn)};
  } catch (...) {
    reduces->abort();
    throw;
  }
}

NcclComm::Ref NcclComm::split(const PeersRef& peers, int color, int key, const NcclOptions& options,
                              Deadline deadline) {
  const Inside inside(inside_);
  expect_usable();
  const std::string name = peers == nullptr ? "" : peers->health().name();
  while (!inflight_.take_finished().empty() || !inflight_.is_settled()) {  // NCCL wants to have nothing else to do
    expect_usable();
    if (has_passed(deadline)) {
      throw CommTimeout(
          peers_->health().prefix(issued_, part_) + "split: operations were still running at its deadline",
          {.seq = issued_});
    }
    if (options.poll) {
      options.poll();
    }
    std::this_thread::sleep_for(kPoll);
  }
  std::shared_ptr<NcclSession> session;
  try {
    session = session_->split(color, key, settings_of(options, name), {}, deadline);
  } catch (const CommError& error) {  // ranks of any color may wait for this one inside NCCL
    Failure failure = failure_of_call(error);
    failure.text = "split: " + failure.text;
    const std::exception_ptr failed_with = fail(std::move(failure));
    give_up(failed_with);
    std::rethrow_exception(failed_with);
  }
  return session == nullptr ? nullptr : around(peers, session, "", options, nullptr);
}

NcclComm::Ref NcclComm::borrow(const PeersRef& peers, int device, NcclCommRef comm, const NcclOptions& options) {
  const Health& health = peers->health();
  auto session = NcclSession::borrow(nccl_api(), device, comm, health.rank(), health.world());
  return around(peers, session, "", options, nullptr);
}

}  // namespace bucketwheel
