"""CRC32C: the vectors of RFC 3720, and a slow version with one table, at every length and alignment."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bucketwheel.native import core

POLYNOMIAL = 0x82F63B78
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
    TABLE.append(byte)


def after(crc: int, data: bytes | memoryview) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def values(size: int) -> memoryview:
    return memoryview(random.Random(size).randbytes(size))


# RFC 3720, appendix B.4; the last one is a read command of iSCSI.
READ = "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (bytes.fromhex(READ), 0xD9963A56),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_vectors_of_the_standard(data: bytes, crc: int) -> None:
    assert core.crc32c(data) == after(0, data) == crc


def test_every_length_and_alignment() -> None:
    data = values(512)
    for begin in range(64):
        expected = 7
        for length in range(301):
            assert core.crc32c(data[begin : begin + length], 7) == expected
            expected = after(expected, data[begin + length : begin + length + 1])


@pytest.mark.parametrize("size", [24575, 24576, 24577, 49152, 73727, 100_000])
def test_blocks_side_by_side(size: int) -> None:
    data = values(size)
    assert core.crc32c(data) == after(0, data)


def test_parts_chain_to_the_whole() -> None:
    data = values(100_000)
    for cut in (0, 1, 24576, 50_001, 100_000):
        assert core.crc32c(data[cut:], core.crc32c(data[:cut])) == core.crc32c(data)


def test_what_has_bytes() -> None:
    floats = np.arange(60, dtype=np.float32).reshape(6, 10)
    for same in (bytearray(floats.tobytes()), memoryview(floats), floats):
        assert core.crc32c(same) == after(0, floats.tobytes())


def test_what_is_refused() -> None:
    x = np.arange(6, dtype=np.uint8)
    with pytest.raises(ValueError, match="not C-contiguous"):
        core.crc32c(x[::2])
    with pytest.raises(TypeError):
        core.crc32c("text")
    with pytest.raises(TypeError):
        core.crc32c(x, -1)
