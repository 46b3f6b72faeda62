"""Writes memory snapshots with those fields of torch 2.13 to 2.15 (torch.cuda.memory._snapshot) that we read."""

from __future__ import annotations

from typing import Any

SEGMENT = 0x7F_0000_0000


class TinyAllocator:
    """One device with one segment. A block lies in the first gap that holds it."""

    def __init__(self, device: int = 0, devices: int = 1) -> None:
        self.entries: list[dict[str, Any]] = []
        self._device, self._devices = device, devices
        self._blocks: dict[int, dict[str, Any]] = {}  # that are not free, by address: what all their entries have
        self._pending: set[int] = set()

    def alloc(self, nbytes: int, stream: int = 0, **frames: Any) -> int:
        """Without ``frames`` none are recorded."""
        address = SEGMENT
        for taken, block in sorted(self._blocks.items()):
            if taken - address >= nbytes:
                break
            address = taken + _rounded(block["size"])
        self._blocks[address] = {"addr": address, "size": nbytes, "stream": stream, **frames}
        self.record("alloc", **self._blocks[address])
        return address

    def free(self, address: int) -> None:
        self.free_requested(address)
        self.free_completed(address)

    def free_requested(self, address: int) -> None:
        self._pending.add(address)
        self.record("free_requested", **self._blocks[address])

    def free_completed(self, address: int) -> None:
        self._pending.remove(address)
        self.record("free_completed", **self._blocks.pop(address))

    def record(self, action: str, **fields: Any) -> None:
        self.entries.append({"action": action, **fields, "time_us": 1_700_000_000_000_000})

    def snapshot(self) -> dict[str, Any]:
        blocks, end = [], SEGMENT
        for address, of in sorted(self._blocks.items()):
            if address > end:
                blocks.append({"size": address - end, "requested_size": 0, "state": "inactive"})
            state = "active_pending_free" if address in self._pending else "active_allocated"
            blocks.append({"size": _rounded(of["size"]), "requested_size": of["size"], "state": state})
            end = address + _rounded(of["size"])
        segment = {"device": self._device, "address": SEGMENT, "stream": 0, "blocks": blocks}
        traces = [self.entries if device == self._device else [] for device in range(self._devices)]
        return {"segments": [segment] if blocks else [], "device_traces": traces}


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
