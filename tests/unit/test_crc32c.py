"""CRC32C: the vectors of RFC 3720, and a slow version with one table, at every length and alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bucketwheel.native import core

POLYNOMIAL = 0x82F63B78
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
    TABLE.append(byte)
PAST_CACHE = 1 << 20  # kPastCacheBytes


def after(crc: int, data: bytes) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def values(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


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
    content = bytes(data.numpy())
    target = torch.empty(512, dtype=torch.uint8)
    for begin in range(64):
        expected = 7
        for length in range(301):
            source, to = data[begin : begin + length], target[63 - begin :][:length].zero_()
            assert core.crc32c(source, 7) == expected
            assert core.crc32c_copy(to, source, 7) == expected and torch.equal(to, source)
            expected = after(expected, content[begin + length : begin + length + 1])


@pytest.mark.parametrize("size", [1535, 1536, 1537, 3072, 4607, 4609, 20000])
def test_blocks_side_by_side(size: int) -> None:
    data = values(size)
    assert core.crc32c(data) == after(0, bytes(data.numpy()))


@pytest.mark.parametrize("more", [-1, 0, 1, 64, 1535, 1536, 5000])
@pytest.mark.parametrize("align", [0, 1, 63])
def test_a_copy_past_the_cache(more: int, align: int) -> None:
    data = values(PAST_CACHE + more)
    memory = torch.full((PAST_CACHE + more + 128,), 9, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + align
    target = memory[begin : begin + data.numel()]
    assert core.crc32c_copy(target, data, 5) == core.crc32c(data, 5)
    assert torch.equal(target, data)
    assert (memory[:begin] == 9).all() and (memory[begin + data.numel() :] == 9).all()


def test_parts_chain_to_the_whole() -> None:
    data = values(100_000)
    for cut in (0, 1, 1536, 16384, 50_001, 100_000):
        assert core.crc32c(data[cut:], core.crc32c(data[:cut])) == core.crc32c(data)
        target = torch.empty_like(data)
        first = core.crc32c_copy(target[:cut], data[:cut])
        assert core.crc32c_copy(target[cut:], data[cut:], first) == core.crc32c(data) and torch.equal(target, data)


def test_what_has_bytes() -> None:
    data = bytes(range(200))
    for same in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8), torch.tensor(list(data)).byte()):
        assert core.crc32c(same) == after(0, data)
    floats = torch.arange(6.0).view(2, 3)
    assert core.crc32c(floats) == core.crc32c(floats.numpy().tobytes())


def test_what_is_refused() -> None:
    x = torch.arange(6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="buffer is not contiguous"):
        core.crc32c(x[::2])
    with pytest.raises(TypeError):
        core.crc32c("text")
    with pytest.raises(ValueError, match="to has 5 bytes, source has 6"):
        core.crc32c_copy(x[1:].clone(), x)
    with pytest.raises(BufferError):
        core.crc32c_copy(bytes(6), x)
    with pytest.raises(TypeError):
        core.crc32c(x, -1)
