"""GPipe and 1F1B over two stages on two data-parallel ranks each: torchrun --nproc-per-node 4 examples/pipeline.py"""

import contextlib

import torch
import torch.distributed as dist

import bucketwheel as bw

STEPS, MICRO, ROWS, WIDTH = 10, 4, 8, 16
DATA = torch.randn(STEPS, 2, MICRO, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))  # 2 data-parallel ranks


def make_stages() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    two = [(torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Linear(64, numel)) for numel in (WIDTH, 1)]
    return [torch.nn.Sequential(*layers) for layers in two]


def train(ahead: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    stage, data_rank, other = rank // 2, rank % 2, rank ^ 2  # other: the rank of the other stage with the same data
    model = make_stages()[stage]
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=group)
    rest = [(kind, m) for back in range(MICRO) for kind, m in (("B", back), ("F", back + ahead)) if m < MICRO]
    for batches in DATA:
        live, sent = {}, []
        for kind, m in [("F", m) for m in range(ahead)] + rest:
            # Only the first stage reduces during its last backward: the first stage waits for the backwards of the second.
            with contextlib.nullcontext() if (stage, kind, m) == (0, "B", MICRO - 1) else opt.no_sync():
                received = torch.empty(ROWS, WIDTH, requires_grad=True)
                if (stage, kind) in ((1, "F"), (0, "B")):
                    dist.recv(received.detach(), other)
                if kind == "B":
                    live[m][1].backward(received if stage == 0 else None)
                else:
                    out = model(received if stage else batches[data_rank, m])
                    live[m] = received, out.square().mean() / MICRO if stage else out
                if (stage, kind) in ((0, "F"), (1, "B")):
                    sent.append(dist.isend(live[m][1].detach() if stage == 0 else live[m][0].grad, other))
        opt.grad_sync(model.parameters())  # the second stage has sent everything and starts to reduce
        opt.step()
        opt.zero_grad()
        [work.wait() for work in sent]
    opt.close()
    return [p.detach() for p in model.parameters()]


dist.init_process_group("gloo")
rank = dist.get_rank()
group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
whole = torch.nn.Sequential(*make_stages())
adam = torch.optim.AdamW(whole.parameters(), lr=1e-2)
for batches in DATA:  # the same training in one process
    adam.zero_grad()
    whole(batches.flatten(0, 2)).square().mean().backward()
    adam.step()
for schedule, ahead in (("GPipe", MICRO), ("1F1B", 2 - rank // 2)):  # ahead: forwards before the first backward
    pairs = zip(train(ahead, group), whole[rank // 2].parameters(), strict=True)
    difference = max(float((ours - theirs.detach()).abs().max()) for ours, theirs in pairs)
    print(f"{schedule} on rank {rank}: parameters differ by {difference:.1e} at most", flush=True)
