"""Packed columns: round trips, rejected bytes and the page's decoder."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lightning_modelprof
from lightning_modelprof.show.tensorboard.packing import pack_columns, unpack_columns

DECODER = Path(lightning_modelprof.__file__).parent / "tensorboard_plugin" / "static" / "columns.js"
LARGEST = 2**53 - 1

INTEGERS = st.integers(-LARGEST, LARGEST) | st.integers(-300, 300)
NEIGHBOURS = st.integers(0, LARGEST) | st.integers(0, 300)  # no difference has more bits than the values
# Low surrogates, as in file names that aren't UTF-8; JSON would join them to a preceding high surrogate.
TEXTS = st.text(st.characters() | st.characters(min_codepoint=0xDC00, max_codepoint=0xDFFF), max_size=8)
META = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-LARGEST, LARGEST)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def columns(draw):
    """Columns of all three kinds, and the names of those stored as differences."""
    found, deltas = {}, set()
    for name in draw(st.lists(TEXTS, max_size=5, unique=True)):
        kind = draw(st.sampled_from(["int", "delta", "float"]))
        values = {"int": INTEGERS, "delta": NEIGHBOURS, "float": st.floats()}[kind]
        dtype = np.float64 if kind == "float" else np.int64
        found[name] = np.array(draw(st.lists(values, max_size=20)), dtype)
        if kind == "delta":
            deltas.add(name)
    return found, frozenset(deltas)


@settings(deadline=None)
@given(st.dictionaries(TEXTS, META, max_size=3), columns())
def test_columns_round_trip(meta, packed_columns):
    values, deltas = packed_columns
    found_meta, found = unpack_columns(pack_columns(meta, values, deltas))
    assert found_meta == meta
    assert list(found) == list(values)
    for name, column in values.items():
        assert found[name].dtype == column.dtype
        assert found[name].tobytes() == column.tobytes()  # NaN and -0.0 too


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64, np.bool_, np.float32])
def test_columns_of_any_width_round_trip(dtype):
    values = np.array([0, 1, 1, 0], dtype)
    _, found = unpack_columns(pack_columns({}, {"x": values}, frozenset({"x"})))
    assert found["x"].tolist() == values.tolist()


def test_bytes_match_description():
    """By hand: zigzag maps 0, -1, 1, 300 to 0, 1, 2, 600, and 600 is 88 4 at seven bits per byte."""
    values = np.array([0, -1, 1, 300])
    packed = pack_columns({"a": "\ud800"}, {"i": values, "d": values, "f": np.array([1.5])}, frozenset({"d"}))
    raw = zlib.decompress(packed)
    (length,) = struct.unpack("<I", raw[4:8])
    assert raw[:4] == b"MPC1"
    assert json.loads(raw[8 : 8 + length]) == {
        "meta": {"a": "\ud800"},
        "columns": [
            {"name": "i", "kind": "int", "count": 4, "bytes": 5},
            {"name": "d", "kind": "delta", "count": 4, "bytes": 5},
            {"name": "f", "kind": "float", "count": 1, "bytes": 8},
        ],
    }
    integers, differences = bytes([0, 1, 2, 0x80 | 88, 4]), bytes([0, 1, 4, 0x80 | 86, 4])
    assert raw[8 + length :] == integers + differences + struct.pack("<d", 1.5)


@pytest.mark.parametrize(
    "values",
    [[2**53], [-(2**53)], [0, 2**62], [-(2**63)], np.array([2**64 - 1], np.uint64)],
)
def test_values_above_53_bits_are_rejected(values):
    for deltas in (frozenset(), frozenset({"x"})):
        with pytest.raises(ValueError, match=r"'x'.*53 bits"):
            pack_columns({}, {"x": np.asarray(values)}, deltas)


def test_differences_above_53_bits_are_rejected():
    """A browser would add a rounded difference."""
    values = np.array([-LARGEST, LARGEST - 1])
    assert unpack_columns(pack_columns({}, {"x": values}))[1]["x"].tolist() == values.tolist()
    with pytest.raises(ValueError, match="53 bits"):
        pack_columns({}, {"x": values}, frozenset({"x"}))


def test_meta_that_is_not_json_is_rejected():
    with pytest.raises(ValueError, match="JSON"):
        pack_columns({"x": float("nan")}, {})


WHOLE = pack_columns(
    {"names": ["a", "b"]},
    {"i": np.arange(-200, 200), "d": np.arange(0, 9000, 9), "f": np.linspace(0, 1, 7)},
    frozenset({"d"}),
)


@settings(deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_damaged_bytes_are_rejected(place, change):
    """The checksum detects a changed byte, unless the change is in the padding of the last byte."""
    damaged = bytearray(WHOLE)
    damaged[place] ^= change
    try:
        meta, columns = unpack_columns(bytes(damaged))
    except ValueError:
        return
    whole_meta, whole = unpack_columns(WHOLE)
    assert meta == whole_meta
    assert {name: one.tolist() for name, one in columns.items()} == {
        name: one.tolist() for name, one in whole.items()
    }


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_bytes_are_rejected(length):
    with pytest.raises(ValueError, match="damaged"):
        unpack_columns(WHOLE[:length])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_other_contents_raise_only_value_error(data):
    """A valid container with other contents gives values or ``ValueError``."""
    raw = bytearray(zlib.decompress(WHOLE))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1) | st.integers(0, min(len(raw) - 1, 260)))
        raw[place] = data.draw(st.integers(0, 255) | st.sampled_from(b'[]{}",:0-e9'))
    cut = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    with contextlib.suppress(ValueError):
        unpack_columns(zlib.compress(bytes(raw[:cut])))


def packed_by_hand(header, data=b""):
    return zlib.compress(b"MPC1" + struct.pack("<I", len(header)) + header + data)


def column(kind, count, size, data=b"", name="x"):
    described = {"name": name, "kind": kind, "count": count, "bytes": size}
    return packed_by_hand(json.dumps({"meta": {}, "columns": [described]}).encode(), data)


def test_column_helper_makes_valid_columns():
    assert unpack_columns(column("int", 1, 1, b"\x02"))[1]["x"].tolist() == [1]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(b"MPC2" + struct.pack("<I", 2) + b"{}"),
        packed_by_hand(b"{}"),
        packed_by_hand(b'{"columns": []}'),
        packed_by_hand(b"[]"),
        packed_by_hand(b"\xff"),
        packed_by_hand(b"[" * 100_000),
        packed_by_hand(b'{"meta": {}, "columns": 3}'),
        packed_by_hand(b'{"meta": {}, "columns": [3]}'),
        column("int", 1, 1),
        column("unheard of", 0, 0),
        column("int", 0, 0, name=[]),
        column("int", 1, 2, b"\x80\x80"),
        column("int", 1, 11, b"\x80" * 10 + b"\x01"),
        column("float", 1, 7, b"1234567"),
        column("int", 1, "1", b"\x02"),
        column("int", 2, 1, b"\x02"),
    ],
)
def test_foreign_bytes_are_rejected(packed):
    with pytest.raises(ValueError):  # noqa: PT011 - any
        unpack_columns(packed)


# The page's decoder

SCRIPT = """
import { readFileSync } from "node:fs";
const source = readFileSync(process.argv[1], "base64");
const { unpackColumns } = await import("data:text/javascript;base64," + source);
const sizes = JSON.parse(process.argv[2]);
const all = readFileSync(0);
let place = 0;
const found = [];
for (const size of sizes) {
  const packed = new Uint8Array(all.subarray(place, place += size)).buffer;
  const { meta, columns } = await unpackColumns(packed);
  // Numbers as the bytes of doubles: JSON has no NaN and no -0.
  const hex = (values) => Buffer.from(values.buffer, values.byteOffset, values.byteLength).toString("hex");
  found.push({ meta, columns: [...columns].map(([name, values]) => [name, hex(values)]) });
}
process.stdout.write(JSON.stringify(found));
"""


@pytest.fixture
def decode_in_node():
    """Decodes packed columns with the page's decoder."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: it runs the page's decoder")

    def decode(*packed):
        sizes = json.dumps([len(one) for one in packed])
        done = subprocess.run(
            [node, "--input-type=module", "--eval", SCRIPT, "--", str(DECODER), sizes],
            input=b"".join(packed),
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr.decode()
        for one in json.loads(done.stdout):
            yield one["meta"], {name: bytes.fromhex(data) for name, data in one["columns"]}

    return decode


EXTREMES = np.array(
    [0, -1, 1, 63, -64, 64, -65, 2**31, -(2**31) - 1, 2**32, 2**52, LARGEST, -LARGEST, LARGEST]
)


def test_page_decodes_same_values(decode_in_node):
    random = np.random.default_rng(5)
    widths = random.integers(0, 53, 5000)
    numbers = (random.random(5000) * 2.0**widths).astype(np.int64) * random.choice([-1, 1], 5000)
    cases = [
        {"extremes": EXTREMES, "none": EXTREMES[:0], "numbers": numbers},
        {"sorted": np.sort(np.abs(numbers)), "down": -np.sort(np.abs(numbers))},
        {
            "float": np.array([0.0, -0.0, 1e308, 5e-324, np.nan, -np.inf]),
            "three bytes": EXTREMES[:3],  # so that the following doubles are unaligned
            "after": np.array([0.1]),
        },
        {},
    ]  # fmt: skip
    metas = [
        {"a": ["</script>", "\U0001f600", "\u2028"], "b": [1, None, True, LARGEST]},
        {},
        {"c": {}},
        {"d": 1.5},
    ]
    deltas = frozenset({"sorted", "down"})
    packed = [pack_columns(meta, case, deltas) for meta, case in zip(metas, cases, strict=True)]
    decoded = list(decode_in_node(*packed))
    assert len(decoded) == 4
    for (meta, found), true_meta, case in zip(decoded, metas, cases, strict=True):
        assert meta == true_meta
        assert list(found) == list(case)
        for name, values in case.items():
            assert found[name] == (values + 0.0 if values.dtype != float else values).tobytes()


@example(LARGEST, 0)
@settings(deadline=None, max_examples=100)
@given(INTEGERS, INTEGERS)
def test_accepted_differences_are_exact_in_doubles(first, second):
    """A browser can add whatever pack_columns accepts."""
    try:
        packed = pack_columns({}, {"x": np.array([first, second])}, frozenset({"x"}))
    except ValueError:
        assert abs(second - first) >= 2**53
        return
    assert float(first) + float(second - first) == second
    assert unpack_columns(packed)[1]["x"].tolist() == [first, second]
