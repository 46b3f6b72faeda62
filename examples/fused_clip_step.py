"""Clip and step a list of tensors with two native calls: the norm reads the gradients once, the step folds the factor
in.

python examples/fused_clip_step.py

Beside it the same with torch: `clip_grad_norm_` writes all gradients once more before AdamW reads them.
"""

import time

import torch

import bucketwheel as bw

MAX_NORM = 1.0
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SHAPES = [(1024, 1024), (1024,), (2048, 1024), (2048,), (3, 5), ()]


def main() -> None:
    torch.manual_seed(0)
    params = [torch.randn(shape) for shape in SHAPES]
    peers = [torch.nn.Parameter(p.clone()) for p in params]
    exp_avgs, exp_avg_sqs = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    peer = torch.optim.AdamW(peers, fused=True, **OPTIONS)
    ours_s = peer_s = float("inf")

    for step in range(1, 11):
        grads = [torch.randn(shape) for shape in SHAPES]
        exact = torch.cat([g.double().flatten() for g in grads]).norm().item()
        start = time.perf_counter()
        norm = bw.l2_norm(grads)
        scale = min(1.0, MAX_NORM / (norm.item() + 1e-6))
        bw.adam_step(params, grads, exp_avgs, exp_avg_sqs, step, grad_scale=scale, **OPTIONS)
        ours_s = min(ours_s, time.perf_counter() - start)

        for p, g in zip(peers, grads, strict=True):
            p.grad = g
        start = time.perf_counter()
        peer_norm = torch.nn.utils.clip_grad_norm_(peers, MAX_NORM)
        peer.step()
        peer_s = min(peer_s, time.perf_counter() - start)
    largest = max((p - q).abs().max().item() for p, q in zip(params, peers, strict=True))
    print(f"after 10 steps the largest difference of a parameter is {largest:.1e}")
    # torch adds squares in float32: its norm, and so its clipping, is off by this much.
    ours_off, peer_off = (abs(n.item() / exact - 1) for n in (norm, peer_norm))
    print(f"relative error of the norm: bucketwheel {ours_off:.0e}, torch {peer_off:.0e}")
    print(f"best step: bucketwheel {1e3 * ours_s:.2f} ms, torch {1e3 * peer_s:.2f} ms")


if __name__ == "__main__":
    main()
