"""`sync_module` beside DistributedDataParallel: what it does to parameters and buffers, and when."""

from __future__ import annotations

import copy
import functools
import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bucketwheel as bw
from bucketwheel.optim import module_sync
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import run_local
from tests.support.replica_ranks import with_replicas
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist


class Vision(nn.Module):
    """Patches, a frozen random base, a table, BatchNorm, and a codebook that forwards read and move."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patch, self.norm, self.head = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.own = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.randn(16))
        self.register_buffer("codes", torch.randn(16, 16).t())
        self.register_buffer("mask", torch.rand(16) > 0.5, persistent=False)
        self.register_buffer("local", torch.tensor(float(seed)))
        self.seen: list[Tensor] = []
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own", "local"])

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.codes.sum())
        hidden = self.norm(self.base(self.patch(x)) + self.table * self.mask)
        if self.training:
            self.codes = 0.75 * self.codes + hidden.detach().mean(0)
        return self.head(torch.tanh(hidden @ self.codes.mul(0.1)))

    @property
    def shared(self) -> dict[str, Tensor]:
        kept = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: kept[name].detach().clone() for name in kept if name not in ("own", "local")}


def batch(*numbers: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(hash(numbers)))


def train(kind: str, rank: int) -> tuple[dict[str, Tensor], list[Tensor], list[float], Vision]:
    model = Vision(seed=rank)
    forward: nn.Module = model
    opt: Any
    waits: AbstractContextManager[Any]
    if kind == "ddp":
        forward = DistributedDataParallel(model)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    else:
        sync = bw.sync_module(model, buffers="forward")
        opt = bw.ShardedAdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        for micro in range(3):
            waits = (forward if kind == "ddp" else opt).no_sync() if micro < 2 else nullcontext()
            with waits:
                forward(batch(step, micro, rank)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [float(forward(batch(step, number)).square().mean()) for number in range(2)]
        model.train()
    seen = model.seen
    if kind != "ddp":
        sync.close()
        opt.close()
        assert not model._forward_pre_hooks
    return model.shared, seen, losses, model


def as_ddp_on(rank: int, world: int) -> list[float]:
    theirs, ours = train("ddp", rank), train("ours", rank)
    assert theirs[0].keys() == ours[0].keys()
    for name, value in theirs[0].items():
        torch.testing.assert_close(ours[0][name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)
    torch.testing.assert_close(torch.stack(ours[1]), torch.stack(theirs[1]), rtol=1e-5, atol=1e-5)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5)
    assert float(ours[3].local) == rank
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, ours[3].own)
    assert not torch.equal(everyone[0], everyone[1]), "DDP leaves it alone, and so does this"
    return ours[2]


def test_training_with_buffers_is_ddps(rank_pool: Any) -> None:
    """Issue 30: BatchNorm, a frozen base and a table, with a seed for each rank; accumulation, and evaluations."""
    first, second = rank_pool(2).run(as_ddp_on, timeout_s=90)
    assert first == second


class Held(nn.Module):
    """Every kind of tensor that a module may hold. Ranks that are threads make it at once."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        self.frozen = nn.Linear(3, 5, dtype=torch.bfloat16).requires_grad_(False)
        self.trained = nn.Linear(7, 3)
        for param in self.parameters():
            param.data.copy_(random(param.shape))
        kinds = (
            torch.float8_e4m3fn,
            torch.bool,
            torch.complex64,
            torch.int64,
            torch.uint8,
            torch.float64,
            torch.float16,
        )
        for i, dtype in enumerate(kinds):
            self.register_buffer(f"of{i}", random(2 * i + 1, 3).mul(3).abs().to(dtype), persistent=bool(i % 2))
        self.register_buffer("spread", random(6, 4)[::2].t())
        self.register_buffer("scalar", torch.tensor(float(seed)))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(x) * self.spread[0]

    def values(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in (*self.parameters(), *self.buffers())]


def expect_first_ones(rank: int, chunk: int, **groups: Any) -> None:
    model, first, own = Held(rank), Held(0), Held(rank)
    versions = [tensor._version for tensor in model.buffers()]
    bw.sync_module(model, "none", **groups)
    assert_bitwise_equal([*model.parameters()], [*first.parameters()])
    assert_bitwise_equal([*model.buffers()], [*own.buffers()])
    module_sync._CHUNK_BYTES = chunk
    with bw.sync_module(model, "forward", **groups):
        assert_bitwise_equal(model.values(), first.values())
        assert all(tensor._version > old for tensor, old in zip(model.buffers(), versions, strict=True))
        opt = bw.ShardedAdamW(model.trained.parameters(), master_weights="none", **groups)
        torch.save(model, saved := io.BytesIO())
        twins = copy.deepcopy(model), torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        for step in range(2):
            for tensor in (*model.buffers(), model.frozen.weight):
                tensor.data.copy_(tensor.clone().fill_(rank))  # as a forward may, and code that raises no version
            loss = model(torch.ones(2, 7)) + model(torch.ones(2, 7))  # two forwards, one backward
            assert float(model.scalar) == 0.0 and float(model.frozen.weight[0, 0]) == rank
            loss.sum().backward()
            opt.step()
            if rank == 0:
                twins[step](torch.ones(2, 7))  # copies of the model have no part in it
        written = model.trained.weight._version
        bw.sync_module(model, **groups)
        assert model.trained.weight._version == written, "its masters are more precise than what it holds"
        opt.close()
    assert not model._forward_pre_hooks
    model.scalar.fill_(rank)
    if rank == 0:
        model(torch.ones(2, 7))
    assert float(model.scalar) == rank


@pytest.mark.parametrize("chunk", [16, 1 << 20])
@pytest.mark.parametrize("where", ["local", "cuda", "replicas"])
def test_all_that_a_module_holds_is_that_of_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, where: str, chunk: int
) -> None:
    monkeypatch.setattr(module_sync, "_CHUNK_BYTES", chunk)
    with posing(delays=2) if where == "cuda" else nullcontext():
        if where == "replicas":
            with_replicas(2, 2, lambda rank, s, r: expect_first_ones(rank, chunk, process_group=s, replicate_group=r))
        else:
            device = "cuda" if where == "cuda" else None
            run_local(2, lambda comm: expect_first_ones(comm.rank, chunk, process_group=comm), device=device)


def test_one_process_has_nothing_to_synchronise() -> None:
    model = Held(3)
    with bw.sync_module(model, "forward") as sync:
        assert not model._forward_pre_hooks
        sync.close()
    assert_bitwise_equal(model.values(), Held(3).values())


def test_modules_that_differ_are_refused_on_all_ranks() -> None:
    def body(comm: bw.Communicator) -> None:
        for change, match in (
            (lambda model: model.register_buffer("more", torch.ones(1)), "has nothing more; rank 1 has 'more'"),
            (lambda model: model.register_buffer("scalar", torch.ones(1)), r"rank 0 has 'scalar': \(\),"),
            (lambda model: model.to("meta"), "rank 0 has 'frozen.weight': .* on "),
        ):
            model = Held(comm.rank)
            if comm.rank:
                change(model)
            with pytest.raises(RuntimeError, match=match):
                bw.sync_module(model, "forward", process_group=comm)
            assert not model._forward_pre_hooks
        with pytest.raises(ValueError, match=r"'frozen.weight': \(5, 3\).* on meta has no plain memory"):
            bw.sync_module(Held(0).to("meta"), process_group=comm)
        model = Held(comm.rank)
        model.register_buffer("table", torch.full((1, 4), 2.0).expand(3, 4))
        before = model.values()
        with pytest.raises(ValueError, match=r"'table': \(3, 4\), .* overlap in memory"):
            bw.sync_module(model, process_group=comm)
        assert_bitwise_equal(model.values(), before)
        bw.sync_module(Held(0), process_group=comm)  # the communicator is as good as before

    run_local(2, body)
    with pytest.raises(ValueError, match="'once', 'forward' or 'none', got 'always'"):
        bw.sync_module(Held(0), "always")
    with pytest.raises(TypeError, match="model is a list, expected a torch.nn.Module"):
        bw.sync_module([])  # type: ignore[arg-type]


def test_what_was_split_is_closed_where_the_next_split_fails() -> None:
    def body(comm: bw.Communicator) -> None:
        other, made = bw.Communicator(bw.LocalWorld(1).rank(0)), []
        comm.split, split = (lambda *args, **names: made.append(split(*args, **names)) or made[0]), comm.split
        other.split = None
        with pytest.raises(TypeError):
            module_sync._own_communicators(Held(0), comm, other)
        with pytest.raises(bw.ClosedError):
            made[0].barrier()

    run_local(2, body)


def evaluate_alone(rank: int, world: int) -> None:
    model = Vision(rank)
    sync = bw.sync_module(model, "forward")
    opt = bw.ShardedAdamW(model.parameters())
    for step in range(2):
        model(batch(step, rank)).sum().backward()
        opt.step()
        opt.zero_grad()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model(batch(9))
                model(batch(9))  # the first alone has broadcast
                apart = copy.deepcopy(model)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sync, "_broadcast", None)
                apart(batch(9)).sum().backward()
                apart(batch(9))  # which would be due
            model.train()
        dist.barrier()
        model(batch(step, rank))
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, model.seen[-1])
        assert everyone[0] == everyone[1]
    if rank == 0:
        model(batch(9))
    sync.close()  # and rank 0 has made one broadcast more
    opt.close()


def compiled(rank: int, world: int, how: str) -> None:
    model = Vision(rank)
    whole = torch.compile(model, backend="eager") if how != "in place" else model
    if how == "in place":
        model.compile(backend="eager")
    sync = bw.sync_module(model if how == "inner" else whole, "forward")
    for _ in range(2):
        model.table.fill_(rank)
        whole(batch(rank)).sum().backward()
        assert not model.table.any()
    sync.close()


def test_rank_0_may_evaluate_alone(rank_pool: Any) -> None:
    """While the others wait for it: what it sends waits for them."""
    rank_pool(2).run(evaluate_alone, timeout_s=60)


@pytest.mark.parametrize("how", ["inner", "outer", "in place"])
def test_compiled_models_are_synchronised(rank_pool: Any, how: str) -> None:
    rank_pool(2).run(compiled, how, timeout_s=90)
