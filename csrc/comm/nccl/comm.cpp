#include "comm/nccl/comm.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "comm/nccl/launch.h"
#include "comm/nccl/memory.h"
#include "comm/peers/patience.h"
#include "comm/reaper.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::microseconds kPoll{100};
constexpr std::chrono::milliseconds kLookPeriod{20};
// How many operations issue() lets pass before it takes those that are over. The watchdog does it too, but from another
// thread, where freeing costs more.
constexpr size_t kReapEvery = 4;

int path_of(const std::string& part) { return part == "/ag" ? 1 : 0; }

NcclSettings settings_of(const NcclOptions& options, const std::string& name) {
  return {options.config, "bw/" + name, options.poll};
}

}  // namespace

NcclComm::NcclComm(PeersRef peers, std::shared_ptr<NcclSession> session, const std::string& part, NcclOptions options,
                   std::shared_ptr<Turn> turn)
    : peers_(std::move(peers)),
      session_(std::move(session)),
      part_(part),
      name_(peers_->health().name() + part),
      who_(std::make_shared<const std::string>(peers_->health().who(part))),
      options_(std::move(options)),
      turn_(std::move(turn)),
      stream_(CudaDevice::at(session_->device()).new_stream("bw" + part)),
      pool_(options_.pool),
      flight_({name_, session_->rank(), session_->world(), "nccl", peers_->health().id()}) {
  if (options_.registers_memory) {
    memory_ = std::make_shared<NcclMemory>(session_);
    pool_ = Pool::make(CudaDevice::at(session_->device()), memory_);
  }
  watch_ = watch([this] { look(); });
  peers_->join();
}

NcclComm::~NcclComm() {
  if (peers_->health().is_forked()) {
    return;
  }
  try {
    close(Clock::now() + kPatience.destructor);
  } catch (const std::exception&) {  // a destructor tells nobody; the peers see a rank that left
  }
  inflight_.await_device(Clock::now() + kPatience.destructor);
}

bool NcclComm::has_windows() const { return memory_ != nullptr && memory_->is_registered(); }

size_t NcclComm::register_pool() {
  expect_usable();
  if (memory_ == nullptr) {
    return 0;
  }
  const Inside inside(inside_);
  expect_usable();
  const std::vector<size_t> mine = memory_->new_slabs();
  const auto bytes = std::as_bytes(std::span(mine));
  post(bytes);
  for (const std::vector<std::byte>& theirs : collect({}, options_.poll)) {
    BW_EXPECTS(std::ranges::equal(theirs, bytes),
               "ranks have different slabs to register (this one " + std::to_string(mine.size()) +
                   "): all ranks must make the same acquires of the pool, in one order, before register_pool()");
  }
  const auto granted = std::make_shared<size_t>(0);
  const auto begin = Clock::now();
  const Deadline deadline = peers_->timeout_from_now();
  try {
    session_->run_blocking(
        "register_pool", deadline,
        [memory = memory_, granted, count = mine.size()] { *granted = memory->register_slabs(count); },
        [&] {
          const bool needs_all = Clock::now() - begin > kPatience.peer;
          if (auto failure = peers_->trouble(0, [&](int) { return needs_all; }, "register_pool")) {
            failure->seq = issued_;
            fail(*failure);
          }
          peers_->health().expect_usable();
          if (options_.poll) {
            options_.poll();
          }
        });
  } catch (const CommError& error) {  // the others wait for this rank inside NCCL
    const std::exception_ptr failure = fail(failure_of_call(error));
    give_up(failure);
    std::rethrow_exception(failure);
  }
  return *granted;
}

// ---- making

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
  const auto gathers = NcclSession::make(nccl_api(), device, id, health.rank(), health.world(),
                                         settings_of(options, health.name() + "/ag"), {true, false}, deadline);
  std::shared_ptr<NcclSession> reduces;
  try {
    reduces = gathers->split(0, health.rank(), settings_of(options, health.name() + "/rs"), {false, true}, deadline);
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

// ---- issuing

void NcclComm::expect_usable() const {
  if ((is_closed_ || (is_closing_ && !peers_->health().has_failed())) && !peers_->health().is_forked()) {
    throw ClosedError(peers_->health().prefix(issued_, part_) + "the communicator is closed", {.seq = issued_});
  }
  peers_->health().expect_usable();
}

std::shared_ptr<Handle::State> NcclComm::new_state(const Operation& op, bool is_captured) const {
  auto state = std::make_shared<Handle::State>();
  state->op = name_of(op.collective);
  state->who = who_;
  state->size_bytes = op.size_bytes;
  state->device = device();
  if (peers_->sees_issued() && !is_captured) {
    state->is_met = [peers = std::weak_ptr<Peers>(peers_), path = path_of(part_), seq = &state->seq] {
      const PeersRef alive = peers.lock();
      return alive == nullptr || alive->have_all_issued(path, *seq);
    };
  }
  return state;
}

// The communicator fails where another rank has called something else.
void NcclComm::expect_same_call(const Operation& op) {
  if (!options_.check) {
    return;
  }
  const std::string differs =
      options_.check(name_, op.seq, text_of(op.description()) + place_text(op) + " #" + std::to_string(op.signature));
  if (!differs.empty()) {
    const std::exception_ptr error = fail({FailureKind::kMismatch, differs, -1, op.seq}, name_of(op.collective));
    give_up(error);
    std::rethrow_exception(error);
  }
}

HandleRef NcclComm::issue(std::shared_ptr<Operation> op, IssueOptions options) {
  BW_EXPECTS(options.caller != nullptr, "an operation on CUDA needs the caller's stream");
  Stream& stream = options.stream != nullptr ? *options.stream : *stream_;
  expect_on_device(stream, session_->device(), "an operation of NCCL");
  const bool is_captured = is_capturing(options.stream != nullptr ? stream : *options.caller);
  auto state = new_state(*op, is_captured);
  Inflight::Item item{op, {}, nullptr, {state, &state->outcome}, std::move(options.keepalive)};
  std::vector<Inflight::Item> finished;  // destroyed without the locks
  expect_usable();                       // before the lock: another thread may be inside NCCL, or the parent process
  CudaGuard guard(session_->device());
  expect_one_capture(is_captured, options);
  for (EventRef& event : options.after) {
    event = on_device(event);  // before the lock too: those that it waits for may need it
  }
  const NcclSession::IssueLock lock = lock_to_issue(*op);
  const Inside inside(inside_);
  expect_usable();
  op->seq = state->seq = seq_ + 1;
  expect_same_call(*op);
  item.ready = order(stream, options, is_captured);
  const Clock::time_point now = Clock::now();
  flight_.issued(*op, now);
  inflight_.enter(op, now);
  std::exception_ptr error;
  try {
    launch_nccl(*session_, *op, stream);
    // Out: whoever uses inputs or outputs next waits for this.
    state->done = item.done = stream.record(options.timing);
  } catch (const std::exception& failure) {
    error = fail(failure_of(failure, rank(), op->seq), state->op);
    item.outcome->fail(error);
    flight_.finished(op->seq, false);
    item.done = is_captured ? nullptr : try_record(stream);  // of a group, a part may be running
  }
  seq_ = op->seq;
  issued_ = seq_;
  peers_->note_issued(path_of(part_), seq_);
  if (turn_ != nullptr && !is_captured) {
    turn_->last_done = item.done;
  }
  if (is_captured && error == nullptr) {
    inflight_.add_captured(std::move(item));
  } else {
    inflight_.add(std::move(item));
  }
  if (error != nullptr) {
    give_up(error);
    std::rethrow_exception(error);
  }
  if (seq_ % kReapEvery == 0) {
    finished = inflight_.take_finished(2 * kReapEvery);
  }
  return std::make_shared<Handle>(std::move(state));
}

// CommTimeout, of which all ranks are told, where whoever is inside NCCL does not come out.
NcclSession::IssueLock NcclComm::lock_to_issue(const Operation& op) {
  Deadline deadline;
  for (;;) {
    NcclSession::IssueLock lock = session_->lock_to_issue_for(deadline ? kLookPeriod : std::chrono::milliseconds{0});
    if (lock) {
      return lock;
    }
    deadline = deadline ? deadline : peers_->timeout_from_now();
    expect_usable();
    if (options_.poll) {
      options_.poll();
    }
    const auto last = has_passed(deadline) ? peers_->last_seqs(path_of(part_)) : std::nullopt;
    if (last) {
      Failure failure{FailureKind::kTimeout, "timeout in " + text_of(op.description()), -1, issued_ + 1};
      failure.text += ": the operation was not issued, because ";
      failure.text += lock.comm ? "another communicator of cuda:" + std::to_string(session_->device())
                                : "another thread of this communicator";
      failure.text += " is inside NCCL";
      failure.last_seqs = *last;
      const std::exception_ptr error = fail(std::move(failure), name_of(op.collective));
      give_up(error);
      std::rethrow_exception(error);
    }
  }
}

void NcclComm::expect_one_capture(bool is_captured, const IssueOptions& options) {
  if (is_captured && turn_ != nullptr) {
    throw CaptureError(
        "the communicators of this pair take turns, which a CUDA graph cannot contain: NCCL_LAUNCH_ORDER_IMPLICIT was "
        "not 1 before NCCL's first launch");
  }
  for (const EventRef& event : options.after) {
    if (is_captured != belongs_to_graph(*event)) {
      throw CaptureError(is_captured
                             ? "after=: a CUDA graph cannot wait for an operation that was issued before its capture: "
                               "wait for the operation before the capture"
                             : "after=: the operation is part of a CUDA graph, and only the graph can wait for it");
    }
  }
  if (!is_captured && options.stream == nullptr && is_capturing(*stream_)) {
    throw CaptureError("communicator '" + name_ +
                       "' is part of a CUDA graph that another thread is capturing; issue others after the capture");
  }
}

// Null when the stream cannot have one any more.
EventRef NcclComm::try_record(Stream& stream) noexcept {
  try {
    return stream.record();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// In: the inputs are complete and the outputs nobody's any more. Without it NCCL reads gradients that are not there
// yet. Returns what the operation waits for.
std::vector<EventRef> NcclComm::order(Stream& stream, const IssueOptions& options, bool is_captured) {
  std::vector<EventRef> ready;
  std::ranges::copy_if(options.after, std::back_inserter(ready),
                       [](const EventRef& event) { return event != nullptr; });
  if (options.stream == nullptr) {
    ready.push_back(options.caller->record());
  }
  if (turn_ != nullptr && turn_->last_done != nullptr && !is_captured) {
    ready.push_back(turn_->last_done);
  }
  for (const EventRef& event : ready) {
    stream.wait(event);
  }
  return ready;
}

// Where the tensors lie in registered memory, which must be the same on all ranks: " at slab 0 + 512, ...".
std::string NcclComm::place_text(const Operation& op) const {
  std::string text;
  for (const TensorPair& pair : op.pairs) {
    const bool is_input = op.collective == Collective::kReduceScatter;
    const View& view = is_input || op.collective == Collective::kAllGather ? pair.full : pair.shard;
    if (memory_ == nullptr || view.numel == 0) {
      continue;
    }
    const Pool::Location location = pool_->locate(view.data, view.size_bytes());
    text += (text.empty() ? " at " : ", ") +
            (location.slab == nullptr
                 ? "other memory"
                 : "slab " + std::to_string(location.slab->id) + " + " + std::to_string(location.offset_bytes));
  }
  return text;
}

// ---- looking after operations

// Called by the watchdog.
void NcclComm::look() noexcept {
  try {
    for (Inflight::Item& one : inflight_.take_finished()) {
      one.keepalive.push_back(std::move(one.op));  // and its sink
      free_later(std::move(one.keepalive));
    }
    if (!is_closed_ && !peers_->health().has_failed()) {
      expect_progress();
    }
  } catch (const std::exception& error) {  // the device is in trouble
    fail(failure_of(error, rank(), issued_));
  }
  if (!is_closed_ && peers_->health().has_failed()) {
    give_up(peers_->health().error());
  }
}

void NcclComm::expect_progress() {
  const std::optional<NcclError> error = session_->async_error();
  const std::optional<Inflight::Front> front = inflight_.front();
  const char* const op = front ? name_of(front->op->collective) : "";
  const std::string what = front ? text_of(front->op->description()) : "";
  const uint64_t seq = front ? front->op->seq : issued_.load();
  // A peer's failure is known before the next operation, which would hang, or block inside NCCL. That a rank is dead
  // NCCL may tell before we know it, and it does not say who it was.
  const bool needs_all = error.has_value() || (front && front->waited > kPatience.peer);
  const std::string needing = peers_->call().in_call(what);
  if (auto failure = peers_->trouble(0, [&](int) { return needs_all; }, needing.c_str())) {
    failure->seq = seq;
    fail(*failure, op);
    return;
  }
  if (error) {
    if (!error_since_) {
      error_since_ = Clock::now();
    }
    if (Clock::now() - *error_since_ > kPatience.peer) {
      fail(failure_of(*error, rank(), seq), op);
    }
    return;
  }
  if (const auto late = front ? peers_->late(front->waited, what, path_of(part_), seq, "issued", op) : std::nullopt) {
    fail(*late, op);
  }
}

std::exception_ptr NcclComm::fail(Failure failure, const char* op) {
  if (failure.kind == FailureKind::kTimeout && failure.last_seqs.empty()) {
    failure.last_seqs = peers_->last_seqs(path_of(part_)).value_or(LastSeqs());
  }
  return peers_->fail(failure, {failure.seq, op, part_});
}

Failure NcclComm::failure_of_call(const CommError& error) {
  Failure failure = failure_of(error, rank(), issued_);
  while (failure.kind == FailureKind::kTimeout && failure.last_seqs.empty()) {
    failure.last_seqs = peers_->last_seqs(path_of(part_)).value_or(LastSeqs());
    std::this_thread::sleep_for(kPoll);
  }
  return failure;
}

// Operations that have not ended fail with `error`, then NCCL is told to end them: in this order, for the event of an
// aborted operation completes like any other.
void NcclComm::give_up(const std::exception_ptr& error) {
  if (inflight_.give_up(error)) {
    session_->abort();
    flight_.write(peers_->health().message());
  }
}

void NcclComm::abort(const std::string& reason) noexcept {
  if (peers_->health().is_forked() || is_closed_) {
    return;
  }
  give_up(fail({FailureKind::kAborted, "aborted by rank " + std::to_string(rank()) + ": " + reason, rank(), issued_}));
}

void NcclComm::close(Deadline deadline) {
  if (peers_->health().is_forked()) {
    return;  // the parent's communicator is not the child's to close
  }
  std::lock_guard lock(close_mutex_);
  if (is_closed_) {
    return;
  }
  is_closing_ = true;  // whoever comes inside from here on sees it
  try {
    while (inflight_.take_finished(), inside_ != 0 || !inflight_.is_settled()) {
      if (has_passed(deadline) || peers_->health().has_failed()) {  // a thread may be stuck in there
        give_up(fail({FailureKind::kClosed, "closed while operations were in flight", -1, issued_}));
        break;
      }
      std::this_thread::sleep_for(kPoll);
    }
  } catch (const DeviceError& error) {  // nothing of this device ends any more; the peers are to hear of it
    give_up(fail(failure_of(error, rank(), issued_)));
  }
  is_closed_ = true;
  if (memory_ != nullptr) {
    memory_->release_windows();
  }
  if (peers_->health().has_failed()) {
    session_->abort();
  } else {
    session_->destroy(earlier(deadline, Clock::now() + kPatience.goodbye));
  }
  peers_->part(deadline);
}

}  // namespace bucketwheel
