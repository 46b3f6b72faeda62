"""Train a byte-level GPT on the source code of Python's standard library, with sharded gradients and optimizer states.

    torchrun --nproc-per-node 2 examples/train_gpt.py                             # two ranks on this machine
    torchrun --nproc-per-node 2 examples/train_gpt.py --zero3                     # parameters are sharded too
    torchrun --nproc-per-node 2 examples/train_gpt.py --compare ddp,zero,fsdp2    # the same training by torch's ways
    python examples/train_gpt.py                                                  # one rank, no process group
    torchrun --nproc-per-node 2 examples/train_gpt.py --save DIR --every 32 --resume    # the same line again goes on

The model is plain torch and carries no wrapper. What shards the training is the optimizer: `sharded_adamw` makes it and
`train_step` uses it; the rest of the file is the model and the data. ``--zero3`` shards the parameters too, by one line
in `sharded_adamw`: a block's are gathered while it computes. train_gpt_checkpoint.py saves and resumes.

``--compare`` trains the same model by DDP, ZeroRedundancyOptimizer and FSDP2 too (train_gpt_peers.py), one after the
other, each in processes of its own whose memory is watched (train_gpt_processes.py). train_gpt_report.py prints and draws.

What is random in a step follows from the seed, the step and, for dropout, the rank. So a resumed training has the bits
of one that was never stopped. A batch is divided over however many ranks there are: another number of ranks may resume,
and its losses agree to 1e-5.

The exit code is 1 when the validation loss does not fall, with ``--compare`` in fp32 when a training loss differs from
that of the first peer by more than 1e-5 relative, with ``--compare`` and ``--zero3`` when one differs at all from that of
whole parameters, and with ``--check-resume`` when a bit differs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import bucketwheel as bw

try:
    from memory_formula import Sizes
    from tqdm import tqdm
    from train_gpt_checkpoint import Checkpoints
    from train_gpt_peers import PEERS, Peer
    from train_gpt_processes import in_fresh_process
    from train_gpt_report import draw, table
except ImportError as error:
    sys.exit(f"{error}: this example needs the 'demo' extra: pip install 'bucketwheel[demo]'")

LARGEST_DIFFERENCE = 1e-5
ZERO2, ZERO3 = "bw.ShardedAdamW", "bw.shard"  # systems: with whole and with sharded parameters
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
    zero3: bool = option(False, "shard the parameters too; with --compare both ways are trained")
    threads: int = option(1, "compute threads per rank")
    seed: int = option(0, "seed of weights and batches")
    compare: str = option("", "train the same model by peers too, of ddp,zero,fsdp2")
    plot: str = option(".", "folder where --compare draws demo.png and memory_by_ranks.png")
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
        if not {*self.peers} <= {*PEERS}:
            parser.error(f"--compare {self.compare}: expected names of {','.join(PEERS)}")
        if self.compare and self.steps < 2:
            parser.error(f"--steps {self.steps}: --compare watches memory in the first half and times the second")
        if self.batch < int(os.environ.get("WORLD_SIZE", "1")):
            parser.error(f"--batch {self.batch}: each of {os.environ['WORLD_SIZE']} ranks needs a sequence at least")

    @property
    def peers(self) -> list[str]:
        return [name for name in self.compare.split(",") if name]

    @property
    def ours(self) -> str:
        return ZERO3 if self.zero3 else ZERO2


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
        options["overlap_param_sync"] = True  # parameters are gathered while the next forward begins
    return bw.ShardedAdamW(parameter_groups(model, config), **options)


def whole_params(model: nn.Module) -> contextlib.AbstractContextManager:
    """Inside all parameters are whole. Collective."""
    return model.full_params() if hasattr(model, "full_params") else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------------- training


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sizes_of(config: Config) -> Sizes:
    with torch.device("meta"):
        model = Gpt(config)
    whole, block = (sum(p.numel() for p in module.parameters()) for module in (model, model.blocks[0]))
    return Sizes(whole, block, whole - config.layers * block)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total / world()).tolist()


@dataclass
class Record:
    """What was seen of one training."""

    name: str
    losses: list[float] = field(default_factory=list)  # nats per byte, one per step, mean over ranks
    validation: list[tuple[int, float]] = field(default_factory=list)  # after how many steps, loss
    seconds: list[dict[str, float]] = field(default_factory=list)  # one per step, by phase
    memory: dict[str, int] = field(default_factory=dict)  # bytes of this rank after the last backward, by part
    peak_bytes: int = 0  # of a rank, the mean over all, where their processes were watched


@dataclass
class Run:
    """One training: the model and what trains it."""

    record: Record
    model: nn.Module  # what to call: for a peer, the wrapped one
    optimizer: bw.ShardedAdamW | Peer
    schedule: torch.optim.lr_scheduler.LRScheduler

    @staticmethod
    def start(name: str, config: Config) -> Run:
        model = make_model(config)
        if name in (ZERO2, ZERO3):
            optimizer = sharded_adamw(name, model, config)
        else:
            optimizer = Peer(name, model, lambda model: parameter_groups(model, config), config.lr)

        def factor(step: int) -> float:
            if step < config.warmup:
                return (step + 1) / config.warmup
            progress = (step - config.warmup) / max(1, config.steps - config.warmup)
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        schedule = torch.optim.lr_scheduler.LambdaLR(getattr(optimizer, "optimizer", optimizer), factor)
        return Run(Record(name), getattr(optimizer, "model", model), optimizer, schedule)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.record.seconds[-1][phase] += time.perf_counter() - start


def train_step(run: Run, text: Tensor, step: int, config: Config) -> float:
    """One optimizer step; returns the loss, the mean over the batches of all ranks."""
    torch.manual_seed(seed_of(config.seed, step, rank()))  # for dropout: no generator's state needs to be saved
    run.record.seconds.append(defaultdict(float))
    optimizer = run.optimizer
    loss_sum = 0.0
    for micro in range(config.accumulate):
        tokens, targets = draw_batch(text, config, step, micro)
        waits = micro < config.accumulate - 1 and isinstance(optimizer, Peer)
        with optimizer.no_sync() if waits else contextlib.nullcontext(), run.timed("forward and backward"):
            loss = run.model(tokens, targets) * (weight_of(tokens, config) / config.accumulate)
            loss.backward()  # full buckets are reduced meanwhile
            # Micro-batches add up in the shards. `no_sync` would save reductions, and keep whole gradients on each rank.
            optimizer.grad_sync()
        loss_sum += loss.item()
    if step == config.steps - 1:
        run.record.memory |= optimizer.memory_summary()
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


def make_model(config: Config) -> Gpt:
    torch.manual_seed(config.seed)
    return Gpt(config).to({"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype])


def train(name: str, config: Config, mark: Callable[[], None] = lambda: None) -> tuple[Record, bool]:
    """What was seen of a training, and what `resumes_alike` says. ``mark`` is called before the model is made and after
    half of the steps; `in_fresh_process` watches the memory between."""
    torch.set_num_threads(config.threads)
    text, validation_text = read_text(config.text_bytes)
    mark()
    run = Run.start(name, config)
    record = run.record
    checkpoints = Checkpoints(config.save, config.every) if config.save and name == config.ours else None
    end = checkpoints.restore(run) if checkpoints and config.resume else 0
    if end:
        say(f"resumed at step {end} from {config.save}")
    else:
        record.validation.append((0, validate(run, validation_text, config)))
    # Silent where stderr is no terminal: a log gets lines instead.
    silent = None if rank() == 0 else True
    with tqdm(desc=name, total=config.steps, initial=end, unit="step", disable=silent) as bar:
        for step in range(end, config.steps):
            if checkpoints:
                checkpoints.save_if_due(run, step)
            if step == config.steps // 2:
                mark()
            record.losses.append(train_step(run, text, step, config))
            bar.update()
            end = step + 1
            if end % config.evaluate_every == 0 or end == config.steps:
                record.validation.append((end, validate(run, validation_text, config)))
                news = f"{name} loss {record.losses[-1]:.3f}, validation {record.validation[-1][1]:.3f}"
                if bar.disable:
                    say(f"step {end}: {news}")
                else:
                    bar.set_postfix_str(news)
    alike = resumes_alike(checkpoints, run, text, config) if checkpoints and config.check_resume else True
    if checkpoints and checkpoints.step < config.steps:
        checkpoints.start_save(run, config.steps)
        checkpoints.finish_save()
        say(checkpoints.summary())
    run.optimizer.close()
    return record, alike


def compare(config: Config) -> tuple[list[Record], bool]:
    """Train by peers and then by ours, one after the other, each in fresh processes."""
    names = [*config.peers, *([ZERO2] if config.zero3 else []), config.ours]
    records, alike = [], True
    for name in names:
        (record, is_alike), grown_bytes = in_fresh_process(train, name, config)
        record.peak_bytes = grown_bytes // world()
        records.append(record)
        alike = alike and is_alike
    return records, alike


def resumes_alike(checkpoints: Checkpoints, run: Run, text: Tensor, config: Config) -> bool:
    """Train again what followed the last save, from the checkpoint: whether all losses and parameters have the same bits."""
    checkpoints.finish_save()
    again = Run.start(run.record.name, config)
    begin = checkpoints.restore(again)
    losses, before = again.record.losses, run.record.losses
    losses += [train_step(again, text, step, config) for step in range(begin, config.steps)]
    with whole_params(run.model), whole_params(again.model):
        pairs = zip(run.model.parameters(), again.model.parameters(), strict=True)
        alike = losses == before and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    again.optimizer.close()
    found = "the same bits" if alike else "FAILED: other bits"
    say(
        f"{checkpoints.summary()}\nresumed at step {begin}, again trained to step {config.steps}: "
        f"loss {losses[-1]!r}, before {before[-1]!r}: {found}"
    )
    return alike


# --------------------------------------------------------------------------------------------------------------- report


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


def largest_difference(record: Record, other: Record) -> float:
    """Of a step's training loss, relative."""
    return max(abs(one - two) / two for one, two in zip(record.losses, other.losses, strict=True))


def check(records: list[Record], config: Config) -> int:
    """The exit code: 0 when the validation loss fell and the systems agree."""
    failures = []
    for record in records:
        first, last = record.validation[0][1], record.validation[-1][1]
        if not last < first:
            failures.append(f"the validation loss of {record.name} did not fall: {first:.4f} to {last:.4f}")
    # A pair and what its training losses may differ by. In bf16 peers have no fp32 masters: they train something else.
    pairs = [(record, records[0], LARGEST_DIFFERENCE) for record in records[1:] if config.dtype == "fp32"]
    if config.compare and config.zero3:
        pairs.append((records[-1], records[-2], 0))
    for one, two, allowed in pairs:
        difference = largest_difference(one, two)
        say(f"{one.name}: largest relative difference of a training loss from {two.name}: {difference:.2e}")
        if not difference <= allowed:
            failures.append(f"it must be at most {allowed:g} between {one.name} and {two.name}, not {difference:.2e}")
    for failure in failures:
        say(f"FAILED: {failure}")
    return 1 if failures else 0


def main() -> int:
    config = Config.from_command_line()
    torch.set_num_threads(config.threads)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    sizes = sizes_of(config)
    say(f"{sizes.parameters / 1e6:.2f} M parameters, {config.dtype}, {world()} rank(s)")
    if config.compare:
        records, alike = compare(config)
    else:
        record, alike = train(config.ours, config)
        records = [record]
    if records[0].seconds:  # else it was resumed when all was done
        tokens = config.batch * config.context * config.accumulate
        say(table(records, sizes.parameters, tokens))
    code = check(records, config) or int(not alike)
    if config.compare and rank() == 0:
        draw(records, sizes, world(), tokens, Path(config.plot))
        say(f"pictures: {config.plot}/demo.png (memory, time, losses) and memory_by_ranks.png")
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
