"""What `make` installs beside the torch that it has installed."""

from __future__ import annotations

from tests import beside_torch


def test_torch_and_its_nccl_stay() -> None:
    pins = "# versions\ntorch==2.13.0\nnvidia-nccl-cu13==2.30.7\nruff==0.17.6\n"
    assert beside_torch.constraints(pins, "2.12.0+cpu", has_nccl=False) == (
        "torch==2.12.0+cpu\nnvidia-nccl-cu13==2.30.7\nruff==0.17.6\n"
    )
    assert beside_torch.constraints(pins, "2.12.0", has_nccl=True) == "torch==2.12.0\nruff==0.17.6\n"
