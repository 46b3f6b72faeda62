"""Operations of the nccl backend that belong to a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from bucketwheel.errors import CaptureError, DeviceError
from bucketwheel.kernels.ops import all_gather
from bucketwheel.testing import assert_bitwise_equal
from tests.support import simulated_cuda
from tests.support.comm_cases import check_usable
from tests.support.nccl_failure_cases import nccl_comm

pytestmark = pytest.mark.dist


def captured(rank: int, size: int) -> None:
    with nccl_comm("captured") as (comm, _):
        library = simulated_cuda.load()[1]
        full, shard = torch.zeros(size * 4), torch.full((4,), float(rank))
        before = all_gather(full, shard, comm)
        with simulated_cuda.Graph(library) as graph:
            with pytest.raises(CaptureError, match="before the CUDA graph was captured"):
                all_gather(full, shard, comm, after=[before])
            handle = all_gather(full, shard, comm)
            handle.wait()
            total = full + 1
        with pytest.raises(CaptureError, match="belongs to a CUDA graph"):
            all_gather(full, shard, comm, after=[handle])
        for call in (handle.query, handle.synchronize, lambda: handle.synchronize(1.0)):
            with pytest.raises(CaptureError):
                call()
        for step in range(3):
            shard.fill_(float(rank + step))
            graph.replay()
            wanted = torch.arange(step, size + step, dtype=torch.float32).repeat_interleave(4)
            assert_bitwise_equal(full, wanted)
            assert_bitwise_equal(total, wanted + 1)
        check_usable(comm)
        library.fake_cuda_free_graph(graph._graph)
        with pytest.raises(DeviceError):
            handle.query()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_captured_operation(world, rank_pool):
    rank_pool(world).run(captured, timeout_s=25)
