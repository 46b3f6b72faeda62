#include "comm/comm.h"

#include <utility>

#include "base/error.h"
#include "comm/operation.h"
#include "comm/peers/peers.h"

namespace bucketwheel {

std::shared_ptr<Operation> Comm::checked(const OperationKind& kind, std::vector<TensorPair> pairs,
                                         std::shared_ptr<ReduceSink> sink) const {
  auto op = make_operation(kind, std::move(pairs), std::move(sink), rank(), world());
  for (size_t i = 0; kind.collective == Collective::kReduceScatter && i < op->pairs.size(); ++i) {
    const DType dtype = op->pairs[i].full.dtype;
    BW_EXPECTS(is_float(dtype) || device().kind == DeviceId::Kind::kCpu,
               "tensor pair " + std::to_string(i) + ": reduce_scatter of " + name_of(dtype) +
                   " on a CUDA device is not " + "supported: float32, bfloat16, float16 and float64 are");
  }
  return op;
}

HandleRef Comm::all_gather(std::vector<TensorPair> pairs, IssueOptions options, std::shared_ptr<ReduceSink> sink) {
  expect_usable();
  return issue(checked({Collective::kAllGather, {}, 0}, std::move(pairs), std::move(sink)), std::move(options));
}

HandleRef Comm::reduce_scatter(std::vector<TensorPair> pairs, Reduction reduction, std::shared_ptr<ReduceSink> sink,
                               IssueOptions options) {
  expect_usable();
  return issue(checked({Collective::kReduceScatter, reduction, 0}, std::move(pairs), std::move(sink)),
               std::move(options));
}

HandleRef Comm::broadcast(const View& tensor, int root, IssueOptions options) {
  expect_usable();
  return issue(checked({Collective::kBroadcast, {}, root}, {{tensor, tensor}}, nullptr), std::move(options));
}

void Comm::post(std::span<const std::byte> payload) {
  expect_usable();
  peers().post(payload);
}

std::vector<std::vector<std::byte>> Comm::collect(Deadline deadline, const std::function<void()>& poll) {
  expect_usable();
  return peers().collect(deadline, poll);
}

HandleRef Request::start(IssueOptions options) const {
  comm_->expect_usable();
  options.keepalive.insert(options.keepalive.end(), keepalive_.begin(), keepalive_.end());
  return comm_->issue(std::make_shared<Operation>(*op_), std::move(options));
}

}  // namespace bucketwheel
