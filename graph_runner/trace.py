"""Nodes of a run in one GGUF file, each with the bytes that it reads and those that it gives: captured, and replayed.

docs/traces.md says what is in the file. To replay it on the NPU takes neither the model nor llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray

from ggml_backend_npu import OPS, KernelError, Memory, Node, Tensor
from ggml_backend_npu.abi import codecs, convert, lib
from ggml_backend_npu.abi.replica import Replica
from ggml_backend_npu.device import DEVICE
from ggml_backend_npu.ir import Dims, overlapping
from ggml_backend_npu.numerics import NUMERICS
from graph_runner.compare import compare
from graph_runner.errors import TraceError
from graph_runner.files import replacing
from graph_runner.kernels import NPU, Kernels
from graph_runner.results import NodeResult, Verdict, dominant_type, types_of
from graph_runner.tolerances import Tolerances
from quant.codec import ROUNDINGS, Rounding

if TYPE_CHECKING:
    from graph_runner.session import Settings

FORMAT = 1

_ARCHITECTURE = "ggml-npu-trace"
_NO_DIGEST = b"0" * 64
_ALIGNMENT = 64  # where memory of ours begins, up to what a tensor's address was beyond such a place
_GUARD = 4096  # bytes on each side of what a node may overwrite
_CANARY = 0xA5
_LIMIT = 1 << 62

Bytes = NDArray[np.uint8]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


# a trace begins with a GGUF's header and these two keys; the digest is that of the file with zeros in its place
_HEADER_BYTES = 24
_PREFIX = b"".join(
    (
        _string("general.architecture") + struct.pack("<I", 8) + _string(_ARCHITECTURE),
        _string("trace.sha256") + struct.pack("<I", 8) + struct.pack("<Q", len(_NO_DIGEST)),
    )
)
_DIGEST_AT = _HEADER_BYTES + len(_PREFIX)


@dataclass(frozen=True)
class Origin:
    """Where the nodes of a trace come from.

    model     llama.cpp's words for it
    device    that computed the expected results
    ggml      its version
    rounding  of q8_0 on that CPU
    threads   that it had
    """

    model: str
    prompt: str
    device: str
    ggml: str
    rounding: Rounding
    threads: int


@dataclass(frozen=True)
class Recorded:
    """A node before it runs, over memory that is its own, and what it is to give.

    expected  the bytes of its output's span
    step      0 is the prompt, then one per decoded token
    index     place among the step's nodes
    """

    node: Node
    expected: Bytes
    step: int = 0
    index: int = 0

    @property
    def reference(self) -> Tensor:
        """The output as it is to be."""
        return replace(self.node.dst, memory=Memory.of(self.expected), offset=0)


def own(node: Node) -> Node:
    """The node over a copy of its tensors' memory: what overlaps still overlaps, and guards lie around it."""
    moved: dict[int, Tensor] = {}
    tensors = {id(tensor): tensor for tensor in (node.dst, *node.src) if tensor is not None and tensor.nbytes}
    for group in overlapping(tensors.values()):
        begin, end = group[0].address, max(tensor.end for tensor in group)
        memory, offset = _room(Memory(begin, end - begin).bytes(), begin % _ALIGNMENT)
        for tensor in group:
            moved[id(tensor)] = replace(tensor, memory=memory, offset=offset + tensor.address - begin)
    src = tuple(moved.get(id(tensor), tensor) if tensor is not None else None for tensor in node.src)
    return replace(node, dst=moved.get(id(node.dst), node.dst), src=src)


def _room(data: Bytes, beyond: int) -> tuple[Memory, int]:
    """Memory between guards that holds data, and where in it: as far beyond an aligned address as given."""
    buffer = np.full(data.size + 2 * _GUARD + 2 * _ALIGNMENT, _CANARY, np.uint8)
    memory = Memory.of(buffer)
    offset = _GUARD + (beyond - memory.address - _GUARD) % _ALIGNMENT
    buffer[offset : offset + data.size] = data
    return memory, offset


def span(tensor: Tensor) -> Bytes:
    """A copy of the bytes of a tensor's span, gaps included."""
    return Memory(tensor.address, tensor.nbytes, owner=tensor.memory).bytes().copy()


# writing


class TraceWriter:
    """Writes a trace, a node at a time: as a context manager, complete or not at all.

    Raises TraceError for a path that cannot be written, or where there is no node.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        check_output(path)
        self._path, self._beside = path, ExitStack()
        self._partial = self._beside.enter_context(replacing(path))
        self._writer = GGUFWriter(self._partial, _ARCHITECTURE, use_temp_file=True)
        self._writer.add_string("trace.sha256", _NO_DIGEST.decode())
        self._writer.add_uint32("trace.format", FORMAT)
        for name, value in vars(origin).items():
            add = self._writer.add_uint32 if isinstance(value, int) else self._writer.add_string
            add(f"trace.{name}", value)
        self._places: dict[bytes, int] = {}
        self._nodes: list[str] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, recorded: Recorded) -> None:
        """Adds a node, which must not be empty."""
        node, place = recorded.node, dict[int, tuple[int, int]]()
        groups: list[dict[str, int]] = []
        tensors = {id(tensor): tensor for tensor in (node.dst, *node.src) if tensor is not None and tensor.nbytes}
        order = {role: number for number, role in enumerate(tensors)}
        for group in sorted(
            overlapping(tensors.values()), key=lambda group: min(order[id(tensor)] for tensor in group)
        ):
            begin, end = group[0].address, max(tensor.end for tensor in group)
            for tensor in group:
                place[id(tensor)] = len(groups), tensor.address - begin
            groups.append({"bytes": self._put(Memory(begin, end - begin).bytes()), "beyond": begin % _ALIGNMENT})

        def described(tensor: Tensor | None) -> dict[str, Any] | None:
            if tensor is None:
                return None
            group, offset = place.get(id(tensor), (None, 0))
            shape = {"name": tensor.name, "type": tensor.type, "ne": tensor.ne, "nb": tensor.nb}
            return shape | {"group": group, "offset": offset}

        data = {
            "step": recorded.step,
            "index": recorded.index,
            "op": node.op,
            "params": node.params.hex(),
            "dst": described(node.dst),
            "src": [described(source) for source in node.src],
            "groups": groups,
            "expected": self._put(recorded.expected),
        }
        self._nodes.append(json.dumps(data, separators=(",", ":")))

    def _put(self, data: Bytes) -> int:
        """The number of the tensor of the file that holds some bytes: one for all that are equal."""
        digest = hashlib.sha256(data.data).digest()
        if digest not in self._places:
            self._places[digest] = len(self._places)
            try:
                self._writer.add_tensor(f"bytes.{self._places[digest]}", data.view(np.int8))
            except OSError as error:
                raise TraceError(f"trace {str(self._path)!r}: {error.strerror or error}") from None
            self.n_bytes += data.size
        return self._places[digest]

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._beside:
                try:
                    if error is not None:
                        raise error
                    if not self._nodes:
                        raise TraceError(f"trace {str(self._path)!r}: no node to write")
                    self._finish()
                finally:
                    self._writer.close()
                    if self._writer.temp_file is not None:
                        self._writer.temp_file.close()
        except OSError as failure:
            if failure is error:
                raise
            raise TraceError(f"trace {str(self._path)!r}: {failure.strerror or failure}") from None

    def _finish(self) -> None:
        self._writer.add_array("trace.nodes", self._nodes)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        digest = _digest(self._partial)
        with self._partial.open("r+b") as file:
            file.seek(_DIGEST_AT)
            file.write(digest)


def check_output(path: Path) -> None:
    """Raises TraceError for a path that no trace can be written to."""
    why = None
    if path.is_dir():
        why = "is a directory"
    elif not path.parent.is_dir():
        why = "no such directory"
    elif path.exists() and not path.is_file():
        why = "is no file"
    elif not os.access(path.parent, os.W_OK):
        why = "its directory may not be written"
    if why is not None:
        raise TraceError(f"trace {str(path)!r}: {why}")


def write_trace(path: Path, nodes: Iterable[Recorded], origin: Origin) -> None:
    """Writes nodes to a file, all or nothing. Raises TraceError."""
    with TraceWriter(path, origin) as writer:
        for recorded in nodes:
            writer.add(recorded)


def save_reproducer(path: Path, node: Node, expected: Tensor, origin: Origin, *, step: int = 0, index: int = 0) -> None:
    """Writes a trace of one node. Its tensors hold what they held before it ran; `expected` is what it is to give.

    Raises TraceError.
    """
    write_trace(path, [Recorded(node, span(expected), step, index)], origin)


def _digest(path: Path) -> bytes:
    """SHA-256 of a trace, with zeros in its place, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_DIGEST_AT) + _NO_DIGEST)
        file.seek(len(_NO_DIGEST), os.SEEK_CUR)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest().encode()


# reading


class Trace:
    """The nodes of a trace: iterated, each is read from the file when it comes, over memory of its own."""

    def __init__(self, origin: Origin, nodes: list[_Stored], data: dict[int, Bytes]) -> None:
        self.origin = origin
        self._nodes, self._data = nodes, data

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Recorded]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Recorded:
        stored = self._nodes[index]
        written = stored.node.dst.memory.address
        memories = {
            number: self._memory(place, beyond, number == written)
            for number, (place, beyond) in enumerate(stored.groups)
        }

        def over(tensor: Tensor) -> Tensor:
            if tensor.nbytes == 0:
                return tensor
            memory, offset = memories[tensor.memory.address]
            return replace(tensor, memory=memory, offset=offset + tensor.offset)

        src = tuple(over(source) if source is not None else None for source in stored.node.src)
        node = replace(stored.node, dst=over(stored.node.dst), src=src)
        return Recorded(node, self._data[stored.expected], stored.step, stored.index)

    def outlines(self) -> Iterator[Node]:
        """The nodes, without what their tensors hold."""
        return (stored.node for stored in self._nodes)

    def _memory(self, place: int, beyond: int, written: bool) -> tuple[Memory, int]:
        data = self._data[place]
        if not written and Memory.of(data).address % _ALIGNMENT == beyond:
            return Memory.of(data), 0
        return _room(data, beyond)


@dataclass(frozen=True)
class _Stored:
    """A node as the file has it: `memory.address` of its tensors is the number of a group; a group is the number of
    the tensor of the file that has its bytes, and how far beyond an aligned address it lay."""

    node: Node
    groups: list[tuple[int, int]]
    expected: int
    step: int
    index: int


def read_trace(path: Path) -> Trace:
    """Opens a trace whose digest is right. Raises TraceError for what is none, not whole, or was changed."""
    where = f"trace {str(path)!r}"
    if not path.is_file():
        raise TraceError(f"{where}: {'is a directory' if path.is_dir() else 'no such file'}")
    try:
        _check_digest(path, where)
        reader = GGUFReader(path, "c")
        return _parsed(reader, where)
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"{where}: {error.strerror or error}") from None
    except Exception as error:
        raise TraceError(f"{where}: cannot be read: {type(error).__name__}: {error}") from None


def _check_digest(path: Path, where: str) -> None:
    with path.open("rb") as file:
        head = file.read(_DIGEST_AT + len(_NO_DIGEST))
    if head[:4] != b"GGUF":
        raise TraceError(f"{where}: not a GGUF file (begins with {head[:4]!r})")
    if head[_HEADER_BYTES:_DIGEST_AT] != _PREFIX[: max(0, len(head) - _HEADER_BYTES)]:
        raise TraceError(f"{where}: a GGUF file, but no trace")
    if head[_DIGEST_AT:] != _digest(path):
        raise TraceError(f"{where}: is cut off or was changed: its SHA-256 is another one")


def _parsed(reader: GGUFReader, where: str) -> Trace:
    values = {name: found.contents() for name, found in reader.fields.items() if name.startswith("trace.")}
    if values.get("trace.format") != FORMAT:
        raise TraceError(f"{where}: is of format {values.get('trace.format')}; format {FORMAT} is read here")
    texts = {name: str(values.get(f"trace.{name}", "")) for name in ("model", "prompt", "device", "ggml")}
    rounding = next((known for known in ROUNDINGS if known == values.get("trace.rounding")), None)
    if rounding is None:
        raise TraceError(f"{where}: has q8_0 rounding {values.get('trace.rounding')!r}, not {' or '.join(ROUNDINGS)}")
    data = {int(t.name.removeprefix("bytes.")): np.asarray(t.data).view(np.uint8) for t in reader.tensors}
    nodes = [_stored(json.loads(text), data) for text in values["trace.nodes"]]
    return Trace(Origin(**texts, rounding=rounding, threads=int(values["trace.threads"])), nodes, data)


def _stored(found: dict[str, Any], data: dict[int, Bytes]) -> _Stored:
    groups = [(int(group["bytes"]), int(group["beyond"]) % _ALIGNMENT) for group in found["groups"]]
    dst = _tensor(found["dst"], groups, data, True)
    src = tuple(_tensor(source, groups, data, False) if source is not None else None for source in found["src"])
    stored = _Stored(
        Node(str(found["op"]), dst, src, bytes.fromhex(found["params"])),
        groups,
        int(found["expected"]),
        int(found["step"]),
        int(found["index"]),
    )
    if dst.nbytes == 0 or data[stored.expected].size != dst.nbytes:
        raise ValueError(f"{stored.node} has {dst.nbytes} bytes, expected are {data[stored.expected].size}")
    return stored


def _tensor(found: dict[str, Any], groups: list[tuple[int, int]], data: dict[int, Bytes], writable: bool) -> Tensor:
    ne, nb = (_dims(found[key]) for key in ("ne", "nb"))
    offset, number = int(found["offset"]), found["group"]
    size = 0 if number is None else data[groups[number][0]].size
    tensor = Tensor(str(found["name"]), str(found["type"]), ne, nb, Memory(number or 0, size, writable), offset)
    if min(*ne, *nb, offset) < 0 or max(*ne, *nb) > _LIMIT or ne[0] % tensor.codec.block_size:
        raise ValueError(f"tensor {tensor.name!r} of {tensor.type} has ne {ne}, nb {nb}, offset {offset}")
    if offset + tensor.nbytes > size:
        raise ValueError(f"tensor {tensor.name!r} ends at byte {offset + tensor.nbytes} of {size}")
    return tensor


def _dims(values: list[int]) -> Dims:
    a, b, c, d = (int(value) for value in values)
    return a, b, c, d


# capturing


class Selection:
    """Which nodes of a run: items with commas between them, of which one is enough.

    GET_ROWS    nodes of an op
    ffn_out-*   nodes of that name; * and ? stand for any text and any character
    17, 17-40   nodes at these places in their step, as a diff counts them
    2:...       the same, in step 2 alone: 2:GET_ROWS, 2:17-40, 0:*

    Raises TraceError for an empty item.
    """

    def __init__(self, text: str) -> None:
        self.items = [item.strip() for item in text.split(",")]
        if not all(self.items) or any(re.fullmatch(r"\d+:", item) for item in self.items):
            raise TraceError(f"nodes {text!r}: an item is empty")
        self._found: set[str] = set()

    def __call__(self, step: int, index: int, node: Node) -> bool:
        found = {item for item in self.items if _matches(item, step, index, node)}
        self._found |= found
        return bool(found)

    @property
    def without_node(self) -> list[str]:
        """Items that no node was."""
        return [item for item in self.items if item not in self._found]


def _matches(item: str, step: int, index: int, node: Node) -> bool:
    if in_step := re.match(r"(\d+):", item):
        if int(in_step[1]) != step:
            return False
        item = item[in_step.end() :]
    if places := re.fullmatch(r"(\d+)(?:-(\d+))?", item):
        return int(places[1]) <= index <= int(places[2] or places[1])
    return item.upper() == node.op or fnmatchcase(node.name, item)


def taken_by_the_npu(step: int, index: int, node: Node) -> bool:
    """The selection of a capture that was given none: nodes that the NPU's kernels and its profile take."""
    return OPS.refusal(node) is None


@dataclass
class Captured:
    """What a capture wrote: how many nodes of which op, and how many bytes of tensors."""

    origin: Origin
    ops: Counter[str] = field(default_factory=Counter)
    n_bytes: int = 0


class _Capture:
    """The observer of a capture: takes down the selected nodes before they run, and what they gave."""

    def __init__(self, ggml: lib.Ggml, select: Callable[[int, int, Node], bool], take: Callable[[Recorded], None]):
        self._ggml, self._select, self._take = ggml, select, take
        self.step, self._index = 0, -1
        self._node: Node | None = None

    def next_step(self) -> None:
        self.step, self._index = self.step + 1, -1

    def before(self, address: int) -> bool:
        self._node = None
        if not convert.computes(convert.op_name(self._ggml, address)):
            return False
        self._index += 1
        node = convert.node(self._ggml, address)
        if node.dst.n_elements and self._select(self.step, self._index, node):
            self._result, self._node = node.dst, own(node)
        return True  # one that runs together with nodes behind it would not be there when they are asked for

    def after(self, _: int) -> None:
        if self._node is not None:
            self._take(Recorded(self._node, span(self._result), self.step, self._index))


def capture(
    model: Path,
    prompt: str,
    path: Path,
    *,
    steps: int = 4,
    settings: Settings | None = None,
    select: Callable[[int, int, Node], bool] = taken_by_the_npu,
    progress: Callable[[float], None] | None = None,
    seen: Callable[[Recorded], None] = lambda recorded: None,
) -> Captured:
    """Runs a prompt and `steps` greedy tokens on llama.cpp's CPU, and writes the selected nodes to a trace.

    settings  of the context, flash attention off where left out; device and n_ctx are set here
    select    called with a node's step, its place in that and the node; nodes of no elements are left out
    progress  called with 0..1 while the model loads
    seen      called with each node that is written

    Raises SessionError for a model or settings that llama.cpp refuses, TraceError for a file that cannot be written,
    or where no node was selected.
    """
    from graph_runner.session import Sampler, Session, Settings, context_for

    check_output(path)
    if path.exists() and model.exists() and path.samefile(model):
        raise TraceError(f"trace {str(path)!r}: is the model")
    ggml = lib.ggml()
    DEVICE.update_from_environment()
    codecs.bind(ggml)
    settings = replace(settings or Settings(flash_attention="off"), device="cpu", n_ctx=context_for(prompt, steps))
    ops = Counter[str]()

    def take(recorded: Recorded) -> None:
        writer.add(recorded)
        ops[recorded.node.op] += 1
        seen(recorded)

    observer = _Capture(ggml, select, take)
    with Session(model, settings, observer=observer, progress=progress) as session:
        threads = settings.threads or os.cpu_count() or 1
        origin = Origin(session.description, prompt, "CPU", ggml.version, NUMERICS.rounding, threads)
        with TraceWriter(path, origin) as writer:
            session.decode(session.tokenize(prompt))
            for _ in range(steps):
                token = Sampler()(session.logits())
                observer.next_step()
                session.decode([token])
            missing = select.without_node if isinstance(select, Selection) else []
            if missing:
                raise TraceError(f"nodes {missing[0]!r}: no node of this run is that")
    return Captured(origin, ops, writer.n_bytes)


# replaying


@dataclass
class ReplayResult:
    """A replay of one trace. Falsy where a node differs, or where none was compared.

    refused  nodes that the device does not take, by op and reason
    """

    path: str
    device: str
    origin: Origin
    nodes: list[NodeResult] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def wrong(self) -> list[NodeResult]:
        return [node for node in self.nodes if not node]

    def __bool__(self) -> bool:
        return bool(self.nodes) and not self.wrong


def replay(path: Path, device: str = NPU, *, seen: Callable[[NodeResult], None] = lambda node: None) -> ReplayResult:
    """Computes each node of a trace on a device and compares with what is expected.

    device  "NPU": the kernels registered here, without llama.cpp; any other that ggml has
    seen    called with each node's result

    Raises TraceError for a file that is no whole trace, KernelError for a device that ggml has not.
    """
    trace = read_trace(path)
    tolerances = Tolerances()
    with _computer(device, trace) as computer:
        result = ReplayResult(str(path), computer.device, trace.origin)
        for recorded in trace:
            node = recorded.node
            reason = computer.refusal(node)
            if reason is not None:
                result.refused[node.op, reason] += 1
                continue
            result.nodes.append(_replayed(recorded, computer, tolerances))
            seen(result.nodes[-1])
    return result


@contextmanager
def _computer(device: str, trace: Trace) -> Iterator[Kernels | Replica]:
    if device.upper() != NPU:
        with Replica(lib.ggml(), device, threads=trace.origin.threads) as replica:
            yield replica
        return
    DEVICE.update_from_environment()
    if any(node.dst.type == "iq4_nl" for node in trace.outlines()) and "iq4_nl" not in NUMERICS.bound:
        codecs.bind(lib.ggml())  # the one type for which only ggml itself rounds as ggml does
    before, NUMERICS.rounding = NUMERICS.rounding, trace.origin.rounding
    try:
        with DEVICE.multiplying("exact"):
            yield Kernels()
    finally:
        NUMERICS.rounding = before


def _replayed(recorded: Recorded, computer: Kernels | Replica, tolerances: Tolerances) -> NodeResult:
    node = recorded.node
    whole = node.dst.memory.bytes()
    before = whole.copy()
    comparison, failure = None, None
    try:
        computer.compute(node)
        comparison = compare(recorded.reference, node.dst, _wrote_outside(node.dst, before))
    except KernelError as error:
        failure = str(error)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    verdict = Verdict.FAILED
    if comparison is not None:
        within = comparison.within(tolerances.nmse(node.op, dominant_type(node)))
        verdict = Verdict.EXACT if comparison else Verdict.ROUNDING if within else Verdict.INTRODUCED
    return NodeResult(
        recorded.step, recorded.index, node.op, node.name, types_of(node), node.dst.ne, verdict,
        isolated=comparison, failure=failure,
    )  # fmt: skip


def _wrote_outside(tensor: Tensor, before: Bytes) -> bool:
    """Whether bytes around a tensor, of its memory, are others than before."""
    after, end = tensor.memory.bytes(), tensor.offset + tensor.nbytes
    return bool((after[: tensor.offset] != before[: tensor.offset]).any() or (after[end:] != before[end:]).any())
