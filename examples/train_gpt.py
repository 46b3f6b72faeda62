"""Train a byte-level GPT on the source code of Python's standard library, with sharded gradients and optimizer states.

    torchrun --nproc-per-node 2 examples/train_gpt.py                        # two ranks on this machine
    torchrun --nproc-per-node 2 examples/train_gpt.py --compare ddp,fsdp2    # beside DDP and FSDP2, each with AdamW
    torchrun --nproc-per-node 2 examples/train_gpt.py --zero3                # parameters are sharded too
    python examples/train_gpt.py                                             # one rank, no process group
    torchrun --nproc-per-node 2 examples/train_gpt.py --save DIR --every 32 --resume    # the same line again goes on

The model is plain torch and carries no wrapper. What shards the training is the optimizer: `sharded_adamw` makes it and
`train_step` uses it; the rest of the file is the model and the data. ``--zero3`` shards the parameters too, by one line
in `sharded_adamw`: a block's are gathered while it computes. train_gpt_checkpoint.py saves and resumes,
train_gpt_peers.py wraps the peers, train_gpt_report.py measures and draws.

What is random in a step follows from the seed, the step and, for dropout, the rank. So a resumed training has the bits
of one that was never stopped. A batch is divided over however many ranks there are: another number of ranks may resume,
and its losses agree to 1e-5.

The exit code is 1 when the validation loss does not fall, with ``--compare`` in fp32 when a training loss differs from
a peer's by more than 1e-5 relative, with ``--compare`` and ``--zero3`` when one differs at all from that of whole
parameters, and with ``--check-resume`` when a bit differs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import bucketwheel as bw

try:
    from tqdm import tqdm
    from train_gpt_checkpoint import Checkpoints
    from train_gpt_peers import PeerAdamW
    from train_gpt_report import draw, peak_of_step, table
except ImportError as error:
    sys.exit(f"{error}: this example needs the 'demo' extra: pip install 'bucketwheel[demo]'")

LARGEST_DIFFERENCE = 1e-5
ZERO2, ZERO3 = "bucketwheel", "bw.shard"  # runs: with whole and with sharded parameters
VOCABULARY = 256  # bytes


def option(default: object, text: str, **kwargs: object) -> object:
    return field(default=default, metadata={"help": text, **kwargs})


@dataclass(frozen=True)
class Config:
    layers: int = option(4, "transformer blocks")
    width: int = option(256, "size of the residual stream")
    heads: int = option(4, "attention heads")
    context: int = option(128, "tokens (bytes) per sequence")
    dropout: float = option(0.0, "share of what blocks add to the residual stream that is dropped")
    batch: int = option(8, "sequences per micro-batch, over all ranks")
    accumulate: int = option(2, "micro-batches per step")
    steps: int = option(64, "optimizer steps")
    lr: float = option(6e-4, "peak learning rate")
    warmup: int = option(10, "steps of linear warm-up; a cosine to a tenth follows")
    weight_decay: float = option(0.1, "weight decay of the matrices")
    clip: float = option(1.0, "largest global gradient norm")
    evaluate_every: int = option(16, "steps between validations")
    evaluate_batches: int = option(4, "batches per validation")
    text_bytes: int = option(8_000_000, "upper bound of the text")
    dtype: str = option("fp32", "parameter type; bf16 keeps fp32 masters in the optimizer", choices=["fp32", "bf16"])
    zero3: bool = option(False, "shard the parameters too; with --compare the run with whole ones is a peer")
    threads: int = option(1, "compute threads per rank")
    seed: int = option(0, "seed of weights and batches")
    compare: str = option("", "train the same model with peers too", choices=["", "ddp", "fsdp2", "ddp,fsdp2"])
    plot: str = option("demo.png", "where --compare draws memory, time and losses")
    save: str = option("", "folder of the checkpoint, which all ranks see; saved at the end, in place of the last one")
    every: int = option(0, "steps between saves, which run beside the training; 0: save at the end only")
    resume: bool = option(False, "go on from the checkpoint in --save, if there is one")
    check_resume: bool = option(False, "at the end train again what followed the last save: the bits must be the same")

    @staticmethod
    def from_command_line() -> Config:
        summary, rest = __doc__.split("\n", 1)
        parser = argparse.ArgumentParser(
            description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for f in fields(Config):
            flag, shown = "--" + f.name.replace("_", "-"), str(f.default) or "NAME"
            if isinstance(f.default, bool):
                parser.add_argument(flag, action="store_true", **f.metadata)
            else:
                parser.add_argument(flag, type=type(f.default), default=f.default, metavar=shown, **f.metadata)
        config = Config(**vars(parser.parse_args()))
        config.expect_consistent(parser)
        return config

    def expect_consistent(self, parser: argparse.ArgumentParser) -> None:
        if (self.every or self.resume or self.check_resume) and not self.save:
            parser.error("--every, --resume and --check-resume need --save DIR")
        if self.check_resume and not 0 < self.every < self.steps:
            parser.error(f"--check-resume needs a save before the end: --every {self.every}, --steps {self.steps}")
        if self.resume and self.compare:
            parser.error("--resume goes without --compare: of the peers nothing is saved")
        if self.batch < int(os.environ.get("WORLD_SIZE", "1")):
            parser.error(f"--batch {self.batch}: each of {os.environ['WORLD_SIZE']} ranks needs a sequence at least")


# ---------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.attention_out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Gpt(nn.Module):
    """Pre-norm GPT. ``forward(tokens, targets)``, both int64 [batch, length], returns the mean cross-entropy in nats."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.dropout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # what adds to the residual stream starts smaller, by how many do
            for linear in (block.attention_out, block.mlp[2]):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)  # the head is the embedding
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------------------------------- data


def read_text(limit_bytes: int) -> tuple[Tensor, Tensor]:
    """Training and validation text (uint8): the standard library's files in sorted order, every tenth for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for index, path in enumerate(sorted(p for p in root.rglob("*.py") if not skipped & {*p.relative_to(root).parts})):
        text = path.read_bytes()[: min(64 * 1024, limit_bytes - size)]  # no file dominates
        parts[index % 10 == 9].append(text)
        size += len(text)
    return tuple(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)


def seed_of(*key: int) -> int:
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % 2**63
    return seed


def draw_batch(text: Tensor, config: Config, *key: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and targets (int64 [sequences, context]) of a batch that is a pure function of the key."""
    generator = torch.Generator().manual_seed(seed_of(config.seed, *key))
    starts = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
    own = starts[rank() * config.batch // world() : (rank() + 1) * config.batch // world()]
    window = text[own + torch.arange(config.context + 1)].long()
    return window[:, :-1], window[:, 1:]


def weight_of(tokens: Tensor, config: Config) -> float:
    """What a rank's loss counts for in the mean over ranks: 1, unless the batch does not divide evenly."""
    return len(tokens) * world() / config.batch


# ------------------------------------------------------------------------------------------------------------ optimizer


def parameter_groups(model: nn.Module, config: Config) -> list[dict]:
    """Vectors first: buckets fill from the last parameter to the first, and those of all blocks are complete at the end."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": config.weight_decay}]


def sharded_adamw(name: str, model: nn.Module, config: Config) -> bw.ShardedAdamW:
    """Each rank keeps its share of the gradients and states, and of the parameters where the run is `ZERO3`. Without a
    process group: a fused AdamW."""
    options = {"lr": config.lr, "betas": (0.9, 0.95)}
    if name == ZERO3:
        bw.shard(model, (Block,))  # the parameters come and go by blocks
    else:
        options |= {"overlap_param_sync": True, "bucket_cap_mb": 2}
    return bw.ShardedAdamW(parameter_groups(model, config), **options)


def whole_params(model: nn.Module) -> contextlib.AbstractContextManager:
    """Inside all parameters are whole. Collective."""
    return model.full_params() if hasattr(model, "full_params") else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------------- training


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total / world()).tolist()


@dataclass
class Run:
    """One training: the model, what trains it, and what was seen of it."""

    name: str
    model: nn.Module  # what to call: for a peer, the wrapped one
    optimizer: bw.ShardedAdamW | PeerAdamW
    schedule: torch.optim.lr_scheduler.LRScheduler
    keeps_grads: bool  # from one step to the next: in shards, or in DDP's buckets
    losses: list[float] = field(default_factory=list)  # nats per byte, one per step, mean over ranks
    validation: list[tuple[int, float]] = field(default_factory=list)  # after how many steps, loss
    seconds: list[dict[str, float]] = field(default_factory=list)  # one per step, by phase
    memory: dict[str, int] = field(default_factory=dict)  # bytes of this rank in the last step

    @staticmethod
    def start(name: str, model: Gpt, config: Config) -> Run:
        if name in (ZERO2, ZERO3):
            optimizer = sharded_adamw(name, model, config)
        else:
            optimizer = PeerAdamW(name, model, lambda model: parameter_groups(model, config), config.lr)

        def factor(step: int) -> float:
            if step < config.warmup:
                return (step + 1) / config.warmup
            progress = (step - config.warmup) / max(1, config.steps - config.warmup)
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        keeps_grads = getattr(optimizer, "is_ddp", world() > 1 or name == ZERO3)
        return Run(name, getattr(optimizer, "model", model), optimizer, schedule, keeps_grads)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[-1][phase] += time.perf_counter() - start


def train_step(run: Run, text: Tensor, step: int, config: Config) -> float:
    """One optimizer step; returns the loss, the mean over the batches of all ranks."""
    torch.manual_seed(seed_of(config.seed, step, rank()))  # for dropout: no generator's state needs to be saved
    run.seconds.append(defaultdict(float))
    optimizer = run.optimizer
    loss_sum = 0.0
    for micro in range(config.accumulate):
        tokens, targets = draw_batch(text, config, step, micro)
        waits = micro < config.accumulate - 1 and isinstance(optimizer, PeerAdamW)
        with optimizer.no_sync() if waits else contextlib.nullcontext(), run.timed("forward and backward"):
            loss = run.model(tokens, targets) * (weight_of(tokens, config) / config.accumulate)
            loss.backward()  # full buckets are reduced meanwhile
            # Micro-batches add up in the shards. `no_sync` would save reductions, and keep whole gradients on each rank.
            optimizer.grad_sync()
        loss_sum += loss.item()
    if step == config.steps - 1:
        run.memory |= optimizer.memory_summary()
    with run.timed("clip"):
        optimizer.clip_grad_norm_(config.clip)
    with run.timed("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    with run.timed("gather of parameters"):
        optimizer.param_sync()  # for the timing only: the next forward waits by itself
    run.schedule.step()
    return mean_over_ranks([loss_sum])[0]


@torch.no_grad()
def validate(run: Run, text: Tensor, config: Config) -> float:
    """Mean loss over the same batches every time."""
    run.model.eval()
    batches = [draw_batch(text, config, config.steps + 1, index) for index in range(config.evaluate_batches)]
    loss = statistics.fmean(run.model(*batch).item() * weight_of(batch[0], config) for batch in batches)
    run.model.train()
    return mean_over_ranks([loss])[0]


def time_plain(model: Gpt, text: Tensor, step: int, config: Config) -> float:
    """Seconds that forward and backward of a step take where nothing wraps the model and nothing trains it."""
    batches = [draw_batch(text, config, step, micro) for micro in range(config.accumulate)]
    start = time.perf_counter()
    for batch in batches:
        model(*batch).backward()
    end = time.perf_counter()
    model.zero_grad()
    return end - start


def make_model(config: Config) -> Gpt:
    torch.manual_seed(config.seed)
    return Gpt(config).to({"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype])


def train(config: Config) -> tuple[list[Run], list[float], bool]:
    """What was trained, ours first; what `time_plain` says now and then if there are peers; what `resumes_alike` says."""
    text, validation_text = read_text(config.text_bytes)
    model = make_model(config)
    peers = [name for name in config.compare.split(",") if name]
    names = [ZERO3, *([ZERO2] if peers else []), *peers] if config.zero3 else [ZERO2, *peers]
    plain, *models = (copy.deepcopy(model) for _ in range(1 + len(names)))
    plain_s: list[float] = []
    runs = [Run.start(name, model, config) for name, model in zip(names, models, strict=True)]
    checkpoints = Checkpoints(config.save, config.every) if config.save else None
    end = checkpoints.restore(runs[0]) if checkpoints and config.resume else 0
    count = sum(p.numel() for p in model.parameters())
    say(f"{count / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {world()} rank(s)")
    if end:
        say(f"resumed at step {end} from {config.save}")
    for run in runs:
        if not end:
            run.validation.append((0, validate(run, validation_text, config)))
    # Silent where stderr is no terminal: a log gets lines instead.
    silent = None if rank() == 0 else True
    with tqdm(total=config.steps * len(runs), initial=end, unit="step", disable=silent) as bar:
        while end < config.steps:
            begin, end = end, min((end // config.evaluate_every + 1) * config.evaluate_every, config.steps)
            # Runs take turns in blocks: a busy machine slows all alike, and yet no run's communication can hide behind
            # another's computation, as it could step by step.
            for run in runs:
                for step in range(begin, end):
                    if checkpoints and run is runs[0]:
                        checkpoints.save_if_due(run, step)
                    is_last = step == config.steps - 1
                    with peak_of_step(run.memory, run.keeps_grads) if is_last else contextlib.nullcontext():
                        run.losses.append(train_step(run, text, step, config))
                    bar.update()
                run.validation.append((end, validate(run, validation_text, config)))
                news = f"{run.name} loss {run.losses[-1]:.3f}, validation {run.validation[-1][1]:.3f}"
                if bar.disable:
                    say(f"step {end}: {news}")
                else:
                    bar.set_postfix_str(news)
            if config.compare:
                plain_s += [time_plain(plain, text, step, config) for step in range(begin, min(begin + 2, end))]
    alike = resumes_alike(checkpoints, runs[0], text, config) if config.check_resume else True
    if checkpoints and checkpoints.step < config.steps:
        checkpoints.start_save(runs[0], config.steps)
        checkpoints.finish_save()
        say(checkpoints.summary())
    for run in runs:
        run.optimizer.close()
    return runs, plain_s, alike


def resumes_alike(checkpoints: Checkpoints, run: Run, text: Tensor, config: Config) -> bool:
    """Train again what followed the last save, from the checkpoint: whether all losses and parameters have the same bits."""
    checkpoints.finish_save()
    again = Run.start(run.name, make_model(config), config)
    begin = checkpoints.restore(again)
    again.losses += [train_step(again, text, step, config) for step in range(begin, config.steps)]
    with whole_params(run.model), whole_params(again.model):
        pairs = zip(run.model.parameters(), again.model.parameters(), strict=True)
        alike = again.losses == run.losses and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    again.optimizer.close()
    found = "the same bits" if alike else "FAILED: other bits"
    say(
        f"{checkpoints.summary()}\nresumed at step {begin}, again trained to step {config.steps}: "
        f"loss {again.losses[-1]!r}, before {run.losses[-1]!r}: {found}"
    )
    return alike


# --------------------------------------------------------------------------------------------------------------- report


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


def check(runs: list[Run], config: Config) -> int:
    """The exit code: 0 when the validation loss fell and the runs agree."""
    code = 0
    for run in runs:
        first, last = run.validation[0][1], run.validation[-1][1]
        if not last < first:
            say(f"FAILED: the validation loss of {run.name} did not fall: {first:.4f} to {last:.4f}")
            code = 1
    for peer in runs[1:]:
        differences = [abs(ours - theirs) / theirs for ours, theirs in zip(runs[0].losses, peer.losses, strict=True)]
        largest = max(differences)
        say(
            f"{peer.name}: largest relative difference of a training loss: {largest:.2e} at step {differences.index(largest) + 1}"
        )
        allowed = 0 if peer.name == ZERO2 else LARGEST_DIFFERENCE
        # In bf16 the others have no fp32 masters: they train something else.
        if (config.dtype == "fp32" or peer.name == ZERO2) and not largest <= allowed:
            say(f"FAILED: it must be at most {allowed:g}")
            code = 1
    return code


def main() -> int:
    config = Config.from_command_line()
    torch.set_num_threads(config.threads)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    runs, plain_s, alike = train(config)
    if runs[0].seconds:  # else it was resumed when all was done
        say(table(runs, plain_s, config.batch * config.context * config.accumulate))
    if config.compare and rank() == 0:
        draw(runs, plain_s, config.plot)
        say(f"memory, time and losses: {config.plot}")
    code = check(runs, config) or int(not alike)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
