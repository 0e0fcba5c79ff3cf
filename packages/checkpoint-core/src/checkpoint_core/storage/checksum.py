"""CRC-32C of a file that several ranks write: each rank digests its own bytes, and the digests add up.

A CRC is linear: the CRC of a file is the exclusive or of the CRCs of its pieces, each moved to its place by a
multiplication in GF(2)[x] modulo the Castagnoli polynomial. So every rank reports one number for each file,
whatever it wrote of it, and nobody reads the file back.

The polynomial and bit order are those of RFC 3720 (iSCSI), appendix B.4.
"""

from collections.abc import Iterable
from functools import lru_cache, reduce
from operator import xor

from crc32c import crc32c

ALGORITHM = "crc32c"
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31


class PartialDigest:
    """The share of one writer in the CRC-32C of a file; pieces come in ascending order of offset."""

    def __init__(self) -> None:
        self._value = 0
        self._position = 0

    def update(self, offset: int, data: bytes | memoryview) -> None:
        """Take in the bytes at an offset.

        Args:
            offset: Where in the file they lie, not before the end of the previous piece.
            data: The bytes, contiguous.
        """
        if offset != self._position:
            self._value = _shift(self._value, offset - self._position)
        self._value = crc32c(data, self._value)
        self._position = offset + len(data)

    def share(self, size: int) -> int:
        """The contribution to the checksum of the whole file.

        Args:
            size: Bytes of the whole file.

        Returns:
            A 32-bit number. The exclusive or of the shares of all writers is the file's CRC-32C.
        """
        return _shift(self._value, size - self._position)


def combine(shares: Iterable[int]) -> str:
    """The checksum of a file.

    Args:
        shares: What each writer of the file contributed; together they cover every byte once.

    Returns:
        CRC-32C as 8 hexadecimal digits.
    """
    return f"{reduce(xor, shares, 0):08x}"


def digest(data: bytes) -> str:
    """The checksum of a few bytes: CRC-32C as 8 hexadecimal digits."""
    return f"{crc32c(data):08x}"


def _shift(crc: int, count: int) -> int:
    """The CRC of what ``crc`` stands for, moved left by ``count`` bytes that belong to others."""
    return _multiply(_power(count), crc) if crc else 0


@lru_cache(maxsize=4096)
def _power(count: int) -> int:
    """``x`` to the power ``8 * count``, modulo the polynomial."""
    if count == 0:
        return _ONE
    half = _power(count // 2)
    square = _multiply(half, half)
    return _multiply(square, _ONE >> 8) if count % 2 else square


def _multiply(left: int, right: int) -> int:
    """Product of two polynomials modulo the Castagnoli one; the highest bit is the constant term."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product
