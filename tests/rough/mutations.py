"""Files as they look on a rough day: cut, flipped, patched, of another kind, and written to do harm."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

# -- any bytes ---------------------------------------------------------------------------------------------------------


def truncated(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def flipped(content: bytes, random: Random) -> bytes:
    """One to eight bits, anywhere; half the time near the beginning, where headers are."""
    changed = bytearray(content)
    reach = len(content) if random.random() < 0.5 else min(len(content), 512)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        changed[random.randrange(reach)] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwritten(content: bytes, random: Random) -> bytes:
    start, size = _span(content, random)
    filler = random.choice((b"\0", b"\xff", b" ", b"{", b'"', b"\n", b"9", None))
    patch = random.randbytes(size) if filler is None else filler * size
    return content[:start] + patch + content[start + size :]


def deleted(content: bytes, random: Random) -> bytes:
    start, size = _span(content, random)
    return content[:start] + content[start + size :]


def doubled(content: bytes, random: Random) -> bytes:
    start, size = _span(content, random)
    return content[: start + size] + content[start:]


def moved(content: bytes, random: Random) -> bytes:
    start, size = _span(content, random)
    rest = content[:start] + content[start + size :]
    place = random.randrange(len(rest) + 1)
    return rest[:place] + content[start : start + size] + rest[place:]


def extended(content: bytes, random: Random) -> bytes:
    return content + random.choice((b"\0", b"\n", b"}", content, random.randbytes(random.randrange(1, 200))))


def _span(content: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(content))
    return start, random.randrange(1, min(len(content) - start, 2 ** random.randrange(1, 12)) + 1)


BYTES: tuple[Mutation, ...] = (
    truncated,
    truncated,
    flipped,
    flipped,
    flipped,
    overwritten,
    deleted,
    doubled,
    moved,
    extended,
)


# -- another kind of file ----------------------------------------------------------------------------------------------


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def foreign(marker: Path) -> list[bytes]:
    """Whole files of other kinds; the pickles among them create ``marker`` if anyone loads them."""
    harmful = [pickle.dumps(Harmful(marker), protocol) for protocol in (0, 2, 4)]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:  # as torch.save makes them
        archive.writestr("archive/data.pkl", harmful[1])
        archive.writestr("archive/version", "3\n")
        archive.writestr("bomb", bytes(2**22))
    objects = b"\x93NUMPY\x01\x00" + _npy_header("'|O'", "(1,)") + harmful[1]
    return [
        b"",
        b"\0",
        b"\n" * 1000,
        bytes(4096),
        b"\xff" * 4096,
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"%PDF-1.7\n",
        b"\x7fELF" + bytes(100),
        b"<html><body>404</body></html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        gzip.compress(b"{}"),
        gzip.compress(bytes(2**20)),
        packed.getvalue(),
        objects,
        *harmful,
    ]


# -- JSON --------------------------------------------------------------------------------------------------------------

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "\ud800",
    "\0",
    "../../etc/passwd",
    "x" * 20_000,
    [],
    [[]],
    {},
    {"": None},
    [None] * 10,
    [1, "a", None],
)


def _harm(random: Random) -> Any:
    return deepcopy(random.choice(HOSTILE))


def hostile_json(content: bytes, random: Random) -> bytes:
    """One or a few values replaced, keys taken away or added; or nested deep."""
    try:
        tree = json.loads(content)
    except ValueError:
        return flipped(content, random)
    if random.random() < 0.03:
        return b"[" * random.choice((10, 1000, 200_000)) + content
    box = [tree]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(random.choice(_places(box)), random)
    text = json.dumps(box[0])
    return text.replace("1e308", random.choice(("1e308", "1e999", "1" * 5000))).encode()


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    found: list[tuple[Any, Any]] = []
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        found.append((tree, key))
        found.extend(_places(tree[key]))
    return found


def _change(place: tuple[Any, Any], random: Random) -> None:
    holder, key = place
    kind = random.randrange(6)
    if kind == 0 and isinstance(holder, dict):
        holder.pop(key, None)
    elif kind == 1 and isinstance(holder, dict):
        holder[random.choice(("", "extra", "__class__", "\ud800"))] = _harm(random)
    elif kind == 2 and isinstance(holder, list):
        holder.append(_harm(random))
    elif kind == 3 and isinstance(holder, dict) and key in holder and isinstance(holder[key], int | float):
        holder[key] = -holder[key] if random.random() < 0.5 else holder[key] + random.choice((1, -1, 0.5, 2**40))
    elif isinstance(holder, list):
        holder[key % len(holder)] = _harm(random) if holder else None
    else:
        holder[key] = _harm(random)


# -- safetensors -------------------------------------------------------------------------------------------------------

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
TORCH |= {"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}


def taken_apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def put_together(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def signed(header: dict[str, Any], data: bytes) -> bytes:
    """With digests that are right, as of someone who means harm."""
    about = header.get("__metadata__", {})
    if "digests" in about:
        found = {}
        for name, tensor in header.items():
            if name != "__metadata__":
                shape = tuple(tensor["shape"])
                start, stop = tensor["data_offsets"]
                kind = zlib.crc32(f"torch.{TORCH.get(tensor['dtype'], '?')} {shape}".encode())
                found[name] = zlib.crc32(data[start:stop], kind)
        if "settings" in about:
            found["the settings"] = zlib.crc32(about["settings"].encode())
        about["digests"] = json.dumps(found)
    return put_together(header, data)


def hostile_header(content: bytes, random: Random) -> bytes:
    """Lengths, offsets, dtypes and shapes that cannot be, or just not here."""
    header, data = taken_apart(content)
    if random.random() < 0.2:
        length = random.choice((0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, len(content), len(content) - 8, 7))
        return struct.pack("<Q", length) + content[8:]
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return hostile_json_in_header(content, random)
    tensor = header[random.choice(names)]
    huge = (-1, 0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40, 0.5, "1", None)
    kind = random.randrange(7)
    if kind == 0:
        tensor["data_offsets"][random.randrange(2)] = random.choice(huge)
    elif kind == 1:
        tensor["data_offsets"] = list(header[random.choice(names)]["data_offsets"])  # overlapping
    elif kind == 2:
        tensor["dtype"] = random.choice((*SIZES, "F8_E4M3", "F8_E5M2", "F4", "C64", "U64", "U32", "X", "", None, 4))
    elif kind == 3:
        tensor["shape"] = [random.choice(huge) for _ in range(random.randrange(1, 5))]
    elif kind == 4 and tensor["shape"]:
        tensor["shape"][random.randrange(len(tensor["shape"]))] = random.choice(huge)
    elif kind == 5:
        tensor["shape"] = [2**32, 2**32] if random.random() < 0.5 else tensor["shape"][::-1]
    else:
        header[random.choice(("weight", "extra", ""))] = random.choice((tensor, {}, [], "x", 5))
    return put_together(header, data)


def unlabelled(content: bytes, random: Random) -> bytes:
    """Without metadata, as other tools write such files, or with metadata that cannot be."""
    header, data = taken_apart(content)
    header["__metadata__"] = random.choice(({}, {}, {"a": "b"}, [], "x", 5, None, {"a": 5}))
    return put_together(header, data)


def hostile_json_in_header(content: bytes, random: Random) -> bytes:
    header, data = taken_apart(content)
    text = hostile_json(json.dumps(header).encode(), random)
    return struct.pack("<Q", len(text)) + text + data


def hostile_metadata(content: bytes, random: Random) -> bytes:
    """Settings that cannot be, in JSON inside the metadata, with the right digests."""
    header, data = taken_apart(content)
    about = header.get("__metadata__")
    if not about:
        return hostile_header(content, random)
    name = random.choice(sorted(about))
    if name == "settings":
        about[name] = hostile_json(about[name].encode(), random).decode("utf-8", "replace")
        return signed(header, data)
    about[name] = random.choice(("", "nan", "-1", "1e999", "x" * 10_000, "{", "[]", "null", "99", "0", "\0"))
    return put_together(header, data)


def reshaped(content: bytes, random: Random) -> bytes:
    """A whole file, rightly signed, with a tensor of another shape, dtype or name, or without it."""
    header, data = taken_apart(content)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return flipped(content, random)
    name = random.choice(names)
    tensor, kind = header[name], random.randrange(4)
    start, stop = tensor["data_offsets"]
    if kind == 0:
        header[random.choice(("other", name + "x", ""))] = header.pop(name)
    elif kind == 1:
        tensor["shape"] = random.choice((tensor["shape"][::-1], [*tensor["shape"], 1], [1, *tensor["shape"]]))
    elif kind == 2:
        other = random.choice([d for d, size in SIZES.items() if size == SIZES[tensor["dtype"]]])
        tensor["dtype"] = other
    else:
        tensor["dtype"], tensor["shape"] = "U8", [stop - start]
    return signed(header, data)


def revalued(content: bytes, random: Random) -> bytes:
    """A whole file, rightly signed, with other numbers in a tensor: a few or all, likely and not."""
    header, data = taken_apart(content)
    names = [name for name in header if name != "__metadata__" and header[name]["data_offsets"][1] > 0]
    if not names:
        return flipped(content, random)
    tensor = header[random.choice(names)]
    (start, stop), size = tensor["data_offsets"], SIZES.get(tensor["dtype"], 1)
    if stop == start:
        return signed(header, data)
    number = random.choice(_NUMBERS.get(tensor["dtype"], (b"\xff" * size,)))
    changed = bytearray(data)
    count = (stop - start) // size
    chosen = range(count) if random.random() < 0.3 else [random.randrange(count) for _ in range(random.choice((1, 3)))]
    for place in chosen:
        changed[start + place * size : start + (place + 1) * size] = number or random.randbytes(size)
    return signed(header, bytes(changed))


_FLOATS = (0.0, -1.0, 1e30, -1e30, 3e38, 1e-40, float("nan"), float("inf"), float("-inf"))
_WHOLE = (0, 1, -1, 5, 63, 64, 127, -128)
_NUMBERS: dict[str, tuple[bytes, ...]] = {
    "F64": (b"", *(struct.pack("<d", value) for value in (*_FLOATS, 1e308))),
    "F32": (b"", *(struct.pack("<f", value) for value in _FLOATS)),
    "BF16": (b"", *(struct.pack("<f", value)[2:] for value in _FLOATS)),
    "F16": (b"", *(struct.pack("<e", value) for value in (0.0, -1.0, 6e4, float("nan"), float("inf")))),
    "I64": (b"", *(struct.pack("<q", value) for value in (*_WHOLE, 2**31, 2**62, -(2**63), 10**6))),
    "I32": (b"", *(struct.pack("<i", value) for value in (*_WHOLE, 2**30, -(2**31)))),
    "I8": (b"", *(struct.pack("<b", value) for value in _WHOLE)),
    "U8": (b"", b"\0", b"\1", b"\2", b"\x40", b"\xff"),
    "BOOL": (b"\0", b"\1", b"\2", b"\xff"),
}
SAFETENSORS: tuple[Mutation, ...] = (
    *BYTES,
    hostile_header,
    hostile_header,
    unlabelled,
    hostile_json_in_header,
    hostile_metadata,
    hostile_metadata,
    reshaped,
    revalued,
    revalued,
)


def hostile_state(content: bytes, random: Random) -> bytes:
    """Hostile JSON of a checkpoint's state, with the right digest or none."""
    try:
        state = json.loads(hostile_json(content, random))
    except (ValueError, RecursionError):
        return flipped(content, random)
    if isinstance(state, dict):
        state.pop("digest", None)
        if random.random() < 0.5:
            state["digest"] = zlib.crc32(json.dumps(state, sort_keys=True).encode())
    return json.dumps(state).encode()


JSON: tuple[Mutation, ...] = (*BYTES, *[hostile_json] * 6)
STATE: tuple[Mutation, ...] = (*BYTES, *[hostile_state] * 8)


# -- .npy --------------------------------------------------------------------------------------------------------------


def _npy_header(dtype: str, shape: str, order: str = "False") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return struct.pack("<H", len(text)) + text


def hostile_npy(content: bytes, random: Random) -> bytes:
    dtypes: tuple[str, ...] = (
        "'<f4'",
        "'>f4'",
        "'<f8'",
        "'<f2'",
        "'<i8'",
        "'|b1'",
        "'<c8'",
        "'<U4'",
        "'|S8'",
        "'|V4'",
        "'<M8[s]'",
        "'|O'",
    )
    dtypes = (
        *dtypes,
        "[('a', '<f4'), ('b', '|O')]",
        "5",
        "None",
        "'x'",
        "'<f4'*9",
        "__import__('os')",
        "(" * 300,
        "'<f16'",
    )
    shapes: tuple[str, ...] = (
        "()",
        "(0,)",
        "(0, 5)",
        "(-1,)",
        "(20, -5)",
        "(2**63,)",
        "(9223372036854775807, 5)",
        "(18446744073709551616,)",
    )
    shapes = (
        *shapes,
        "(4294967296, 4294967296)",
        "(100,)",
        "(5, 20)",
        "(20, 5, 1)",
        "[20, 5]",
        "('a',)",
        "None",
        "(1e9,)",
        "(True,)",
    )
    version = random.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x04\x00", b"\x00\x00", b"\xff\xff"))
    order = random.choice(("False", "True", "None", "3"))
    header = _npy_header(random.choice(dtypes), random.choice(shapes), order)
    if version == b"\x02\x00":
        header = struct.pack("<I", random.choice((len(header) - 2, 2**31, 0))) + header[2:]
    return b"\x93NUMPY" + version + header + content[128:]


NPY: tuple[Mutation, ...] = (*BYTES, *[hostile_npy] * 6)


# -- tables of text ----------------------------------------------------------------------------------------------------

CELLS: tuple[str, ...] = (
    "",
    " ",
    '"',
    '""',
    "'",
    ",",
    "\t",
    "|",
    "\0",
    "\ufeff",
    "\x1a",
    "\r",
    "nan",
    "1e999",
    "-1",
    "9" * 5000,
)
CELLS = (*CELLS, "x" * 200_000, "\u2028", "\U0001f600", "=1+1", "null", "[]", "{}", "# a", "-DOCSTART-", "\\", "\x85")


def patched(content: bytes, random: Random) -> bytes:
    """Lines taken away, doubled, mixed, cut; strange cells put in; other line ends and encodings."""
    lines = content.split(b"\n")
    at, kind = random.randrange(len(lines)), random.randrange(9)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, random.choice(lines))
    elif kind == 2:
        random.shuffle(lines)
    elif kind == 3:
        return b"\r\n".join(lines) if random.random() < 0.5 else b"\r".join(lines)
    elif kind == 4:
        text = content.decode("utf-8", "replace")
        return text.encode(random.choice(("utf-16", "utf-8-sig", "latin-1", "utf-32", "utf-7")), "replace")
    else:
        cell = random.choice(CELLS).encode()
        line = lines[at]
        place = random.randrange(len(line) + 1)
        lines[at] = line[:place] + cell + line[place + random.choice((0, 0, 3)) :]
    return b"\n".join(lines)


def hostile_line(content: bytes, random: Random) -> bytes:
    """Of JSON lines: one of them hostile."""
    lines = content.split(b"\n")
    at = random.randrange(len(lines))
    lines[at] = hostile_json(lines[at], random) if lines[at] else b"[]"
    return b"\n".join(lines)


TEXT: tuple[Mutation, ...] = (*BYTES, *[patched] * 8)
LINES: tuple[Mutation, ...] = (*BYTES, *[patched] * 4, *[hostile_line] * 6)
