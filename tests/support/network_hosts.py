"""Hosts that are network namespaces of this machine, each with one link to a switch: for ranks that share no network but that.

A rank is a thread of a process on its host, from `enter` on: neither its sockets, nor abstract Unix ones, reach another host
but over the link, which can be cut. Needs root, or what else may make namespaces, and the tool ``ip``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tests.support.requirements import unmet

_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")
_LINK = "eth0"


@dataclass(frozen=True)
class Hosts:
    name: str
    count: int

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def cut(self, host: int) -> None:
        """Its link: what is sent is lost, and nobody is told."""
        _ip(f"-n {self.switch} link set port{host} down")


@contextlib.contextmanager
def network_hosts(count: int) -> Iterator[Hosts]:
    """Skips the test where there can be none."""
    hosts = Hosts(f"bw{os.getpid()}", count)
    try:
        _ip(f"netns add {hosts.switch}")
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        unmet("netns", f"network namespaces cannot be made here: {said}")
    try:
        _ip(f"-n {hosts.switch} link add switch type bridge")
        _ip(f"-n {hosts.switch} link set switch up")
        for host in range(count):
            namespace = hosts.namespace(host)
            _ip(f"netns add {namespace}")
            _ip(f"-n {hosts.switch} link add port{host} type veth peer name {_LINK} netns {namespace}")
            _ip(f"-n {hosts.switch} link set port{host} master switch up")
            _ip(f"-n {namespace} addr add {_address(host)}/24 dev {_LINK}")
            _ip(f"-n {namespace} link set {_LINK} up")
            _ip(f"-n {namespace} link set lo up")
        yield hosts
    finally:
        for namespace in [hosts.switch, *(hosts.namespace(host) for host in range(count))]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {namespace}")


def enter(hosts: Hosts, rank: int, world: int, timeout_s: float = 60.0) -> None:
    """Makes this thread, and those that it starts, live on host ``rank``, in a gloo process group of all."""
    import torch.distributed as dist

    with open(_FOLDER / hosts.namespace(rank)) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({hosts.namespace(rank)})")
    os.environ["GLOO_SOCKET_IFNAME"] = _LINK
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(_address(0), 29_500, world, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)
