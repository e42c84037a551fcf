"""What the tensors of a run hold between the node that writes them and the nodes that read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ggml_backend_npu.ggml.convert import Read, Storage, bytes_at
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir.buffer import Buffer
from graph_runner.judging.copies import continues_dst, digest_of, is_read


@dataclass(frozen=True)
class Changed:
    """A tensor that no longer holds what the last node wrote into it.

    tensor   its name
    written  the node that wrote it; None if no node has written it yet
    """

    tensor: str
    written: str | None

    def __str__(self) -> str:
        return repr(self.tensor) + (f", which {self.written} wrote" if self.written else "")


@dataclass(frozen=True)
class Stray:
    """A tensor that was changed although no node writes there.

    what  the tensor that was found to hold something else
    step, index  when: before which node; 0, 0 if it may have been before any
    seen  that node, which was about to read it; None: it was found after the last step
    """

    what: Changed
    step: int
    index: int
    seen: str | None

    def __str__(self) -> str:
        when = f"step {self.step}: before {self.seen}" if self.seen is not None else "after the last step"
        comma = "," if self.what.written else ""
        return f"{when}, {self.what}{comma} holds something else than it did"


@dataclass
class _Known:
    storage: Storage
    digest: int
    written: str | None


class Contents:
    """Digests of the tensors of one run, each since a node wrote it or first read it.

    Tensors that are set from outside (inputs, a scheduler's copies) are left out: there is no callback for that.

    read  returns the bytes of a span, by address and size: of host memory, or of a device
    closely  whether to look at weights each time, or the first time and at the end alone
    """

    def __init__(self, read: Callable[[int, int], Any] = bytes_at, *, closely: bool = True) -> None:
        self.read, self._closely = read, closely
        self._known: dict[int, _Known] = {}

    def changed(self, reads: Iterable[Read], besides: Collection[int] = ()) -> list[Changed]:
        """Returns the tensors that nodes read, or that their outputs continue from, and that no longer hold the same.

        besides  addresses of storages to leave out
        """
        found = []
        for storage in _read_by(*reads):
            if storage.is_set or storage.address in besides or not storage.tensor.nbytes:
                continue
            if storage.is_weight and not self._closely and storage.address in self._known:
                continue
            digest = self._digest_of(storage)
            known = self._known.setdefault(storage.address, _Known(storage, digest, None))
            if known.digest != digest:
                found.append(Changed(storage.tensor.name, known.written))
                known.digest = digest
        return found

    def written(self, read: Read) -> None:
        """Called after a node has written its output."""
        self._known[read.dst.address] = _Known(read.dst, self._digest_of(read.dst), str(read.node))

    def is_constant(self, storage: Storage) -> bool:
        """Whether no node has written to a tensor so far."""
        return storage.address not in self._known or self._known[storage.address].written is None

    def differing(self, besides: Collection[int]) -> list[Changed]:
        """Returns all tensors that now hold something else. A tensor that is no longer needed may be among them.

        besides  addresses of storages to leave out
        """
        known = [each for each in self._known.values() if each.storage.address not in besides]
        known = [each for each in known if self._digest_of(each.storage) != each.digest]
        return [Changed(each.storage.tensor.name, each.written) for each in known]

    def weights_changed(self) -> list[Changed]:
        """Returns the weights that no longer hold the same, if they were not looked at each time."""
        weights = [each for each in self._known.values() if each.storage.is_weight and not self._closely]
        return [
            Changed(each.storage.tensor.name, None) for each in weights if self._digest_of(each.storage) != each.digest
        ]

    def _digest_of(self, storage: Storage) -> int:
        """Returns the digest of the bytes as they lie in memory: for a packed tensor, quants and scales."""
        return digest_of(storage.tensor.address, storage.tensor.nbytes, self.read)

    def rest(self, spans: Iterable[tuple[int, int]], reads: Iterable[Read]) -> Rest:
        """Returns the content of spans of memory without the outputs of some nodes."""
        return Rest(spans, reads, self.read)

    def buffers(self, ggml: Ggml) -> list[tuple[int, int]]:
        """Returns [begin, end) addresses of the buffers of all tensors seen so far."""
        found = {each.storage.buffer: each.storage.tensor.buffer for each in self._known.values()}
        return [_extent(ggml, handle, buffer) for handle, buffer in found.items() if handle]


def _extent(ggml: Ggml, handle: int, buffer: Buffer | None) -> tuple[int, int]:
    """Returns [begin, end) of a ggml_backend_buffer_t, which lies in host memory if it is no device's buffer."""
    if buffer is not None:
        return buffer.address, buffer.address + buffer.size
    begin = int(ggml.ggml_backend_buffer_get_base(handle) or 0)
    return begin, begin + int(ggml.ggml_backend_buffer_get_size(handle))


@lru_cache(8192)
def _read_by(*reads: Read) -> list[Storage]:
    found: dict[int, Storage] = {}
    for read in reads:
        found.update(
            {each.address: each for i, each in enumerate(read.src) if each is not None and is_read(read.node, i)}
        )
        if read.view_source and continues_dst(read.node):
            found[read.dst.address] = read.dst
    return list(found.values())


class Rest:
    """The content of spans of memory without the outputs of some nodes, before these nodes run and after.

    spans  [begin, end) addresses
    reads  the nodes
    read   returns the bytes of a span
    """

    def __init__(
        self, spans: Iterable[tuple[int, int]], reads: Iterable[Read], read: Callable[[int, int], Any] = bytes_at
    ) -> None:
        self._read = read
        outputs = sorted(_output(read) for read in reads)
        self._parts: list[tuple[int, int]] = []
        for begin, end in spans:
            for first, last in outputs:
                if begin < last and first < end:
                    self._parts.append((begin, first))
                    begin = max(begin, last)
            self._parts.append((begin, end))
        self._digests = self._taken()

    def _taken(self) -> list[int]:
        return [digest_of(begin, end - begin, self._read) for begin, end in self._parts]

    def has_changed(self) -> bool:
        """Whether the spans now hold something else."""
        return self._taken() != self._digests


def _output(read: Read) -> tuple[int, int]:
    """Returns the [begin, end) addresses where a node writes: for a packed tensor the whole of it, since its scales lie
    apart."""
    dst = read.node.dst if read.node.dst.packed is None else read.dst.tensor
    return dst.address, dst.end
