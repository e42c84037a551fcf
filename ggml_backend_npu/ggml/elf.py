"""Programs as files: what they export, and a copy that can be loaded as a library (ELF of 64 bits, little endian)."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_ET_DYN, _PT_DYNAMIC, _SHT_DYNSYM, _DT_FLAGS_1, _DF_1_PIE = 3, 2, 11, 0x6FFFFFFB, 0x08000000


def exports(file: Path, name: str) -> bool:
    """Whether a program or library defines a symbol for others to use. False for a file that is none."""
    with suppress(OSError, struct.error):
        return name.encode() in _defined(file.read_bytes())
    return False


def _defined(data: bytes) -> set[bytes]:
    if data[:6] != b"\x7fELF\x02\x01":
        return set()
    *_, at, _, _, _, _, size, count, _ = _HEADER.unpack_from(data)
    sections = [_SECTION.unpack_from(data, at + i * size) for i in range(count)]
    found = set()
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind == _SHT_DYNSYM:
            names = sections[link][4]
            for place in range(offset, offset + length, entry):
                name, _, _, section, _, _ = _SYMBOL.unpack_from(data, place)
                if section:
                    found.add(data[names + name : data.index(b"\0", names + name)])
    return found


def as_library(program: Path, copy: Path) -> bool:
    """Writes a copy of a position-independent program that the loader takes for a library: without the flag by which it
    refuses programs. Returns False for a program with a fixed place, of which there can be none."""
    data = bytearray(program.read_bytes())
    _, kind, _, _, _, at, _, _, _, size, count, *_ = _HEADER.unpack_from(data)
    if kind != _ET_DYN:
        return False
    for i in range(count):
        kind, _, offset, _, _, length, _, _ = _SEGMENT.unpack_from(data, at + i * size)
        for place in range(offset, offset + length, _DYNAMIC.size) if kind == _PT_DYNAMIC else ():
            tag, value = _DYNAMIC.unpack_from(data, place)
            if tag == _DT_FLAGS_1:
                _DYNAMIC.pack_into(data, place, tag, value & ~_DF_1_PIE)
    copy.write_bytes(data)
    return True
