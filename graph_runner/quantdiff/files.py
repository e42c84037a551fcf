"""GGUF files whose tensors are taken apart, and put together anew in memory."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from ggml_backend_npu.ggml import lib
from graph_runner.base.errors import SessionError
from graph_runner.base.limits import free_memory
from graph_runner.base.models import check_file
from quant import codec, dequantize

_LAYER = re.compile(r"blk\.(\d+)\.")
_VERSION = 3
_NOT_COMPARED = ("general.", "quantize.", "tokenizer.chat_template", "GGUF.")
_SPLIT = "split.count"


@dataclass(frozen=True)
class Weights:
    """A tensor of a model's file.

    type  the name of its ggml type
    ne    its elements, dimension 0 first
    data  its bytes, uint8 (n,)
    """

    name: str
    type: str
    ne: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, None if to none."""
        found = _LAYER.match(self.name)
        return None if found is None else int(found[1])

    @property
    def kind(self) -> str:
        """Its name without the layer: attn_q.weight."""
        return _LAYER.sub("", self.name)

    @property
    def n_weights(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.ne))

    def rows(self, begin: int, end: int) -> NDArray[np.float32]:
        """The values of rows [begin, end) of ne[0] elements, float32 (end - begin, ne[0])."""
        of_row = self.ne[0] // codec(self.type).block_size * codec(self.type).block_bytes
        return dequantize(self.data[begin * of_row : end * of_row].reshape(end - begin, of_row), self.type)


class ModelFile:
    """A model's GGUF file. Raises SessionError if it is none, or one part of several.

    tensors  by name, in the file's order
    """

    def __init__(self, path: Path) -> None:
        check_file(path)
        self.path = path
        try:
            self._reader = GGUFReader(path)
            self.tensors = {each.name: _weights(each) for each in self._reader.tensors}
        except Exception as error:
            said = " ".join(str(error).split())
            raise SessionError(f"model {str(path)!r}: not a whole GGUF file: {said}") from None
        if _SPLIT in self._reader.fields and self._reader.fields[_SPLIT].contents() > 1:
            raise SessionError(f"model {str(path)!r}: is one of several parts; llama-gguf-split --merge joins them")
        if not self.tensors:
            raise SessionError(f"model {str(path)!r}: has no tensors")

    @property
    def n_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(each.data.nbytes for each in self.tensors.values())

    @property
    def n_weights(self) -> int:
        """How many elements all tensors have."""
        return sum(each.n_weights for each in self.tensors.values())

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.n_bytes / self.n_weights

    @cached_property
    def _keys(self) -> dict[str, Any]:
        """The values of keys that two files of one model have in common, those of lists as bytes."""
        return {
            name: field.contents() if len(field.parts) < 64 else b"".join(map(bytes, field.parts[3:]))
            for name, field in self._reader.fields.items()
            if not name.startswith(_NOT_COMPARED) or name == "general.architecture"
        }

    def refuse_another(self, other: ModelFile) -> None:
        """Raises SessionError if another file is not of the same model."""
        both = f"models {str(self.path)!r} and {str(other.path)!r}"
        for name, value in self._keys.items():
            if name in other._keys and other._keys[name] != value:
                shown = f": {value!r} and {other._keys[name]!r}" if len(repr(value)) < 40 else ""
                raise SessionError(f"{both}: differ in {name}{shown}")
        for name in (*self.tensors, *other.tensors):
            pair = self.tensors.get(name), other.tensors.get(name)
            lacking = next((file for file, each in zip((self, other), pair, strict=True) if each is None), None)
            if lacking is not None:
                raise SessionError(f"{both}: tensor {name!r} is not in {str(lacking.path)!r}")
            if pair[0].ne != pair[1].ne:  # type: ignore[union-attr]
                shapes = " and ".join(str([*each.ne]) for each in pair if each is not None)
                raise SessionError(f"{both}: tensor {name!r} has ne {shapes}")

    @contextmanager
    def with_tensors(self, tensors: Sequence[Weights]) -> Iterator[Path]:
        """Yields a file in memory that has this file's keys and other tensors. Raises SessionError if there is too
        little memory for it."""
        needed, free = sum(each.data.nbytes for each in tensors), free_memory()
        if free is not None and needed > free:
            raise SessionError(f"a mixed model takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free")
        with os.fdopen(os.memfd_create("ggml-npu"), "wb") as file:
            file.write(self._header(tensors))
            for each in tensors:
                file.write(bytes(-file.tell() % self._alignment))
                file.write(each.data.data)
            file.write(bytes(-file.tell() % self._alignment))
            file.flush()
            yield Path(f"/proc/self/fd/{file.fileno()}")

    @property
    def _alignment(self) -> int:
        return int(self._reader.alignment)

    def _header(self, tensors: Sequence[Weights]) -> bytes:
        """What stands before the tensors: keys, then names, sizes, types and places."""
        first = min(int(each.field.offset) for each in self._reader.tensors)
        begin = int(self._reader.fields["GGUF.kv_count"].offset) + 8
        n_keys = int(self._reader.fields["GGUF.kv_count"].parts[0][0])
        parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), n_keys), self._reader.data[begin:first].tobytes()]
        place = 0
        for each in tensors:
            name = each.name.encode()
            parts.append(struct.pack("<Q", len(name)) + name + struct.pack("<I", len(each.ne)))
            parts.append(struct.pack(f"<{len(each.ne)}QIQ", *each.ne, lib.ggml().type_numbers[each.type], place))
            place += -(-each.data.nbytes // self._alignment) * self._alignment
        return b"".join(parts)


def _weights(tensor: Any) -> Weights:
    ne = tuple(int(n) for n in tensor.shape)
    data = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    return Weights(tensor.name, codec(tensor.tensor_type.name).name, ne, data)
