"""CRC-32C equals the reference package on every length and alignment, by the instruction and by tables."""

from __future__ import annotations

import crc32c as reference
import numpy as np
import pytest

from gdskv.io import crc
from gdskv.io.crc import crc32c, crc32c_at, crc32c_table_at

LENGTHS = [*range(70), 255, 256, 767, 768, 769, 3071, 3072, 3073, 3840, 4096, 65536, 100_003, (1 << 20) + 5]


def test_known_answers() -> None:
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # the check value of CRC-32C
    assert crc32c(np.zeros(32, np.uint8)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(np.full(32, 0xFF, np.uint8)) == 0x62A8AB43
    assert crc32c(np.arange(32, dtype=np.uint8)) == 0x46DD794E
    assert crc32c(np.zeros(0, np.uint8)) == 0


@pytest.mark.parametrize("offset", [0, 1, 3, 7])
def test_equals_the_reference_on_random_bytes(offset: int) -> None:
    rng = np.random.default_rng(offset)
    for length in [*LENGTHS, *rng.integers(0, 20_000, 100)]:
        data = rng.integers(0, 256, offset + length, dtype=np.uint8)[offset:]
        expected = reference.crc32c(data.tobytes())
        assert crc32c(data) == expected, length
        assert crc32c_table_at(data.ctypes.data, data.nbytes) == expected, length


def test_hardware_and_tables_agree() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    assert crc32c_at(data.ctypes.data, data.nbytes) == crc32c_table_at(data.ctypes.data, data.nbytes)
    assert isinstance(crc.HARDWARE, bool)


def test_each_single_flipped_bit_changes_the_checksum() -> None:
    data = np.random.default_rng(2).integers(0, 256, 512, dtype=np.uint8)
    good = crc32c(data)
    for byte in range(len(data)):
        data[byte] ^= 1 << byte % 8
        assert crc32c(data) != good
        data[byte] ^= 1 << byte % 8


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        crc32c(np.zeros(16, np.uint8)[::2])
