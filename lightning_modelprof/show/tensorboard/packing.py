"""Columns of numbers with a description, packed for browsers.

The packed form is zlib of::

    "MPC1"                      4 bytes
    length of the header        4 bytes, unsigned, little-endian
    header                      UTF-8 JSON: {"meta": {...}, "columns": [{name, kind, count, bytes}, ...]}
    the columns, one after the other, "bytes" long

A column of ``kind`` ``int`` has one variable-length number per value (LEB128: seven bits per byte, lowest
first, the high bit set on all but the last). ``delta`` has the differences to the previous value (the first:
to 0) in the same form. Both use zigzag (0, -1, 1, -2 → 0, 1, 2, 3). ``float`` has little-endian doubles. A
browser reads it with ``DecompressionStream("deflate")`` and one loop (``static/columns.js``).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_MAGIC: Final = b"MPC1"
_LEVEL: Final = 6
_FIXED_BYTES: Final = 8
"""Bytes before the header."""

_MOST_BYTES: Final = 10
"""Maximum bytes of one number: 64 bits, seven per byte."""

MAX_UNPACKED_BYTES: Final = 2**29
"""Maximum bytes of a blob: a timeline of ten million slices, about 5 bytes each, has a tenth of it."""

Columns = Mapping[str, NDArray[Any]]


def inflate(packed: bytes) -> bytes:
    """Decompress zlib bytes, a few of which can contain gigabytes.

    Raises:
        ValueError: if they are damaged, or contain more than ``MAX_UNPACKED_BYTES``.
    """
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"damaged bytes: {error}") from error
    if inflater.unconsumed_tail or not inflater.eof:
        is_more = len(raw) >= MAX_UNPACKED_BYTES
        raise ValueError(f"more than {MAX_UNPACKED_BYTES:,} bytes" if is_more else "damaged bytes: cut off")
    return raw


def pack_columns(meta: Mapping[str, Any], columns: Columns, deltas: frozenset[str] = frozenset()) -> bytes:
    """Pack columns of numbers.

    Args:
        meta: plain JSON values that describe the columns.
        columns: name → values, shape (n,): integers of at most 53 bits, which a browser can hold, or floats.
        deltas: names of integer columns whose adjacent values are close.

    Raises:
        ValueError: if an integer, or a stored difference, has more than 53 bits.
    """
    described, packed = [], []
    for name, values in columns.items():
        if values.dtype.kind == "f":
            kind, data = "float", values.astype("<f8").tobytes()
        else:
            kind = "delta" if name in deltas else "int"
            data = _pack_integers(name, values, is_delta=kind == "delta")
        described.append({"name": name, "kind": kind, "count": len(values), "bytes": len(data)})
        packed.append(data)
    header = json.dumps({"meta": meta, "columns": described}, ensure_ascii=True, allow_nan=False).encode()
    return zlib.compress(b"".join((_MAGIC, struct.pack("<I", len(header)), header, *packed)), _LEVEL)


def check_columns(packed: bytes) -> dict[str, int]:
    """Check that the description and the columns' lengths are complete, without decoding numbers.

    Returns:
        Column name → number of values.

    Raises:
        ValueError: if they aren't.
    """
    raw = inflate(packed)
    header, place = _header(raw)
    for column in header.columns:
        if not 0 <= column.count <= column.bytes:
            raise ValueError(f"damaged columns: {column.count} values in {column.bytes} bytes")
        place += column.bytes
    if place != len(raw):
        raise ValueError(f"damaged columns: {len(raw)} bytes instead of {place}")
    return {column.name: column.count for column in header.columns}


class _PackedColumn(msgspec.Struct):
    name: str
    kind: str
    count: int
    bytes: int


class _Header(msgspec.Struct):
    meta: dict[str, Any]
    columns: tuple[_PackedColumn, ...]


def _header(raw: bytes) -> tuple[_Header, int]:
    """Return the description of the columns, and where the first one starts.

    Raises:
        ValueError: if there is none.
    """
    if raw[:4] != _MAGIC or len(raw) < _FIXED_BYTES:
        raise ValueError("damaged columns: wrong start")
    (length,) = struct.unpack_from("<I", raw, 4)
    try:
        # The json module allows unpaired surrogates, which some names have.
        header = msgspec.convert(json.loads(raw[_FIXED_BYTES : _FIXED_BYTES + length]), type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"damaged columns: {error}") from error
    return header, _FIXED_BYTES + length


def unpack_columns(packed: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the description and the columns: int64 or float64.

    Raises:
        ValueError: if :func:`pack_columns` didn't make these bytes.
    """
    raw = inflate(packed)
    header, place = _header(raw)
    columns = {}
    try:
        for column in header.columns:
            columns[column.name] = _unpack(column.kind, raw[place : place + column.bytes], column.count)
            place += column.bytes
    except (TypeError, OverflowError) as error:
        raise ValueError(f"damaged columns: {error}") from error
    return header.meta, columns


def _unpack(kind: str, data: bytes, count: int) -> NDArray[Any]:
    if kind == "float":
        values: NDArray[Any] = np.frombuffer(data, "<f8").astype(np.float64)
    elif kind in ("int", "delta"):
        values = _unpack_integers(data)
        values = np.cumsum(values) if kind == "delta" else values
    else:
        raise ValueError(f"damaged columns: unknown kind {kind!r}")
    if len(values) != count:
        raise ValueError(f"damaged columns: {len(values)} values instead of {count}")
    return values


def _pack_integers(name: str, values: NDArray[Any], *, is_delta: bool) -> bytes:
    _check_bits(name, values)
    numbers = values.astype(np.int64)
    if is_delta:
        numbers = np.diff(numbers, prepend=np.int64(0))
        _check_bits(name, numbers)  # a browser adds them up, so each must fit
    unsigned = ((numbers << 1) ^ (numbers >> 63)).astype(np.uint64)  # zigzag
    packed = np.empty((len(unsigned), _MOST_BYTES), np.uint8)
    is_used = np.empty(packed.shape, np.bool_)
    rest = unsigned
    is_used[:, 0] = True
    for place in range(_MOST_BYTES):
        following = rest >> np.uint64(7)
        packed[:, place] = (rest & np.uint64(0x7F)) | ((following != 0).astype(np.uint64) << np.uint64(7))
        if place + 1 < _MOST_BYTES:
            is_used[:, place + 1] = following != 0
        rest = following
    return packed[is_used].tobytes()


def _check_bits(name: str, values: NDArray[Any]) -> None:
    if len(values) and max(abs(int(values.min())), abs(int(values.max()))) >= 2**53:
        raise ValueError(f"column {name!r}: a number or a difference exceeds 53 bits")


def _unpack_integers(data: bytes) -> NDArray[np.int64]:
    raw = np.frombuffer(data, np.uint8)
    if not len(raw):
        return np.empty(0, np.int64)
    ends = np.flatnonzero(raw < 0x80)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise ValueError("damaged columns: last number cut off")
    starts = np.concatenate(([0], ends[:-1] + 1))
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    if place.max() >= _MOST_BYTES:
        raise ValueError("damaged columns: a number exceeds 64 bits")
    septets = (raw & 0x7F).astype(np.uint64) << (place * 7).astype(np.uint64)
    unsigned = np.bitwise_or.reduceat(septets, starts)
    values: NDArray[np.int64] = (unsigned >> np.uint64(1)).astype(np.int64) ^ -(
        unsigned & np.uint64(1)
    ).astype(np.int64)
    return values
