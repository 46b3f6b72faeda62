"""Which threads the kernels run on in a process that computes with torch."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import torch
from bucketwheel.kernels import ops

def threads():
    return len(os.listdir("/proc/self/task"))

def adam(tensors):
    p, g, m, v = tensors
    ops.adam_step([p], [g], [m], [v], 1, lr=1e-2)

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
tensors = [torch.rand(200_000, generator=generator) for _ in range(4)]
alone = [x.clone() for x in tensors]
torch.set_num_threads(1)
adam(alone)
torch.set_num_threads(2)
torch.exp(torch.ones(1 << 22))  # torch has its team of two threads from here on

before = threads()
in_parent = [x.clone() for x in tensors]
adam(in_parent)
ops.l2_norm(in_parent)
assert threads() == before, f"{threads() - before} threads besides torch's"

child = os.fork()
if child == 0:
    signal.alarm(60)
    adam(tensors)
    assert threads() == 1, threads()  # torch's team does not exist here
    pieces = [zip(a.split(8192), b.split(8192)) for a, b in zip(tensors, alone)]  # small: torch must not use threads
    os._exit(0 if all(torch.equal(x, y) for piece in pieces for x, y in piece) else 3)
_, status = os.waitpid(child, 0)
assert status == 0, f"the child ended with {status}"
assert all(torch.equal(a, b) for a, b in zip(in_parent, alone))
"""


# A child that is the first to load the library, after its parent made torch's team.
FIRST_IN_CHILD = """
import os, signal, sys
import torch
{imports}
torch.set_num_threads(2)
torch.exp(torch.ones(1 << 22))
child = os.fork()
if child == 0:
    signal.alarm(60)
    from bucketwheel.kernels import ops
    os._exit(0 if ops.l2_norm([torch.ones(8192) for _ in range(50)]).item() == 640.0 else 3)
_, status = os.waitpid(child, 0)
assert status == 0, f"the child ended with {{status}}"
"""


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_step_uses_the_threads_that_torch_has_and_computes_alone_in_a_forked_child() -> None:
    run(SCRIPT)


@pytest.mark.parametrize("imports", ["import bucketwheel", ""])
def test_a_forked_child_may_be_the_first_to_use_the_library(imports: str) -> None:
    run(FIRST_IN_CHILD.format(imports=imports))
