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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray

from ggml_backend_npu import Backend, Graph, Memory, Node, Tensor, default_backend
from ggml_backend_npu.abi import convert, lib
from ggml_backend_npu.abi.fenced import ALIGNMENT, fenced
from ggml_backend_npu.abi.replica import Replica
from ggml_backend_npu.ir import Dims, overlapping
from ggml_backend_npu.packed import PACKED_TYPES, Packed
from graph_runner.compare import compare
from graph_runner.copies import Copied, blank, continues_dst, held_by, span
from graph_runner.errors import TraceError
from graph_runner.files import replacing
from graph_runner.results import NodeResult, Verdict, failure_of, types_of
from graph_runner.rules import Rules
from graph_runner.spans import Collected
from quant.codec import ROUNDINGS, Rounding

if TYPE_CHECKING:
    from graph_runner.session import Settings

NPU = "NPU"
FORMAT = 2  # 1 has a single node in each entry, and no options

_ARCHITECTURE = "ggml-npu-trace"
_NO_DIGEST = b"0" * 64
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
    options   of the NPU that they are to be computed with, by field name; kernels: of a user, the file and its SHA-256
    """

    model: str
    prompt: str
    device: str
    ggml: str
    rounding: Rounding
    threads: int
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A node before it runs, over memory that is its own, and what it is to give.

    expected  the bytes of its output's span
    step      0 is the prompt, then one per decoded token
    index     place among the step's nodes
    lead      nodes before it, that are to run together with it as one operator
    wanted    what of their outputs is to come of that, each with its bytes
    """

    node: Node
    expected: Bytes
    step: int = 0
    index: int = 0
    lead: tuple[Node, ...] = ()
    wanted: tuple[tuple[Tensor, Bytes], ...] = ()

    @property
    def graph(self) -> Graph:
        """The nodes, of which only the last one is read beyond them."""
        nodes = (*self.lead, self.node)
        producers = tuple(
            tuple(_made_by(source, nodes[:place]) for source in node.src) for place, node in enumerate(nodes)
        )
        return Graph(nodes, producers, (*[()] * len(self.lead), (self.node.dst,)))

    @property
    def reference(self) -> Tensor:
        """The output as it is to be."""
        return replace(self.node.dst, memory=Memory.of(self.expected), offset=0, packed=None)


def _made_by(source: Tensor | None, nodes: tuple[Node, ...]) -> int | None:
    """Which node's output a source is a view of."""
    if source is None or not source.nbytes:
        return None
    places = [
        place for place, node in enumerate(nodes) if node.dst.address <= source.address and source.end <= node.dst.end
    ]
    return places[-1] if places else None


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
        for name, value in (vars(origin) | {"options": json.dumps(origin.options)}).items():
            add = self._writer.add_uint32 if isinstance(value, int) else self._writer.add_string
            add(f"trace.{name}", value)
        self._places: dict[bytes, int] = {}
        self._nodes: list[str] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, recorded: Recorded) -> None:
        """Adds a node, which must not be empty."""
        nodes, place = recorded.graph.nodes, dict[int, tuple[int, int]]()
        groups: list[dict[str, int]] = []
        tensors = {
            id(tensor): tensor
            for node in nodes
            for tensor in (node.dst, *node.src)
            if tensor is not None and tensor.nbytes
        }
        tensors |= {id(tensor): tensor for tensor, _ in recorded.wanted}
        order = {role: number for number, role in enumerate(tensors)}
        for group in sorted(
            overlapping(tensors.values()), key=lambda group: min(order[id(tensor)] for tensor in group)
        ):
            begin, end = group[0].address, max(tensor.end for tensor in group)
            for tensor in group:
                place[id(tensor)] = len(groups), tensor.address - begin
            whole = held_by(group, begin, end).bytes()
            groups.append({"bytes": self._put(whole), "beyond": begin % ALIGNMENT})

        def described(tensor: Tensor | None) -> dict[str, Any] | None:
            if tensor is None:
                return None
            group, offset = place.get(id(tensor), (None, 0))
            shape = {"name": tensor.name, "type": tensor.type, "ne": tensor.ne, "nb": tensor.nb}
            return shape | {"group": group, "offset": offset} | ({"packed": True} if tensor.packed is not None else {})

        data = {
            "step": recorded.step,
            "index": recorded.index,
            "nodes": [
                {
                    "op": node.op,
                    "params": node.params.hex(),
                    "dst": described(node.dst),
                    "src": [described(source) for source in node.src],
                }
                for node in nodes
            ],
            "groups": groups,
            "expected": self._put(recorded.expected),
            "wanted": [{"tensor": described(tensor), "bytes": self._put(data)} for tensor, data in recorded.wanted],
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


def save_nodes(
    path: Path, graph: Graph, expected: Mapping[int, Tensor], origin: Origin, *, step: int = 0, index: int = 0
) -> None:
    """Writes a trace of a node, or of nodes that are to run as one operator. Their tensors hold what they held before.

    expected  what they are to give, by place: the last one's output, of others all or a view

    Raises TraceError.
    """
    *lead, last = graph.nodes[: max(expected) + 1]
    wanted = tuple(
        (_on(graph.nodes[place].dst, tensor), span(tensor)) for place, tensor in expected.items() if place < len(lead)
    )
    recorded = Recorded(last, span(expected[len(lead)]), step, index, tuple(lead), wanted)
    write_trace(path, [recorded], origin)


def _on(dst: Tensor, view: Tensor) -> Tensor:
    """A view over the memory of dst, which it begins with."""
    return replace(view, memory=dst.memory, offset=dst.offset, packed=None)


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
        packed = {each.memory.address for each in stored.tensors() if each.packed is not None}
        memories = {
            number: self._memory(place, beyond, stored.type_of(number) if number in packed else None)
            for number, (place, beyond) in enumerate(stored.groups)
        }

        def over(tensor: Tensor) -> Tensor:
            if tensor.nbytes == 0:
                return tensor
            memory, offset, layout = memories[tensor.memory.address]
            return replace(tensor, memory=memory, offset=offset + tensor.offset, packed=layout)

        nodes = tuple(
            replace(node, dst=over(node.dst), src=tuple(over(each) if each is not None else None for each in node.src))
            for node in stored.nodes
        )
        wanted = tuple((over(tensor), self._data[place]) for tensor, place in stored.wanted)
        return Recorded(nodes[-1], self._data[stored.expected], stored.step, stored.index, nodes[:-1], wanted)

    def outlines(self) -> Iterator[Node]:
        """The nodes, without what their tensors hold."""
        return (node for stored in self._nodes for node in stored.nodes)

    def _memory(self, place: int, beyond: int, packed: str | None) -> tuple[Memory, int, Packed | None]:
        data = self._data[place]
        memory, offset = fenced(Memory.of(data), beyond)
        if packed is None:
            return memory, offset, None
        storage = memory.bytes()[offset : offset + data.size]
        return memory, offset, Packed.of(packed, memory.address + offset, storage)


@dataclass(frozen=True)
class _Stored:
    """Nodes as the file has them: `memory.address` of their tensors is the number of a group; a group is the number of
    the tensor of the file that has its bytes, and how far beyond an aligned address it lay; a tensor in the device's
    layout is marked by one that holds nothing."""

    nodes: tuple[Node, ...]
    groups: list[tuple[int, int]]
    expected: int
    wanted: list[tuple[Tensor, int]]
    step: int
    index: int

    def tensors(self) -> list[Tensor]:
        """All of their tensors."""
        return [tensor for node in self.nodes for tensor in (node.dst, *node.src) if tensor is not None]

    def type_of(self, group: int) -> str:
        """Of the tensors of a group."""
        return next(each.type for each in self.tensors() if each.nbytes and each.memory.address == group)


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
    if values.get("trace.format") not in (1, FORMAT):
        raise TraceError(f"{where}: is of format {values.get('trace.format')}; formats 1 and {FORMAT} are read here")
    texts = {name: str(values.get(f"trace.{name}", "")) for name in ("model", "prompt", "device", "ggml")}
    rounding = next((known for known in ROUNDINGS if known == values.get("trace.rounding")), None)
    if rounding is None:
        raise TraceError(f"{where}: has q8_0 rounding {values.get('trace.rounding')!r}, not {' or '.join(ROUNDINGS)}")
    options = {str(name): str(value) for name, value in json.loads(values.get("trace.options", "{}")).items()}
    data = {int(t.name.removeprefix("bytes.")): np.asarray(t.data).view(np.uint8) for t in reader.tensors}
    nodes = [_stored(json.loads(text), data) for text in values["trace.nodes"]]
    origin = Origin(**texts, rounding=rounding, threads=int(values["trace.threads"]), options=options)
    return Trace(origin, nodes, data)


def _stored(found: dict[str, Any], data: dict[int, Bytes]) -> _Stored:
    groups = [(int(group["bytes"]), int(group["beyond"]) % ALIGNMENT) for group in found["groups"]]
    stored = _Stored(
        tuple(_node(each, groups, data) for each in found.get("nodes", [found])),
        groups,
        int(found["expected"]),
        [(_tensor(each["tensor"], groups, data, True), int(each["bytes"])) for each in found.get("wanted", [])],
        int(found["step"]),
        int(found["index"]),
    )
    for tensor, place in [(stored.nodes[-1].dst, stored.expected), *stored.wanted]:
        if tensor.nbytes == 0 or data[place].size != tensor.nbytes:
            raise ValueError(f"{stored.nodes[-1]} has {tensor.nbytes} bytes, expected are {data[place].size}")
    return stored


def _node(found: dict[str, Any], groups: list[tuple[int, int]], data: dict[int, Bytes]) -> Node:
    src = tuple(_tensor(source, groups, data, False) if source is not None else None for source in found["src"])
    return Node(str(found["op"]), _tensor(found["dst"], groups, data, True), src, bytes.fromhex(found["params"]))


def _tensor(found: dict[str, Any], groups: list[tuple[int, int]], data: dict[int, Bytes], writable: bool) -> Tensor:
    ne, nb = (_dims(found[key]) for key in ("ne", "nb"))
    offset, number = int(found["offset"]), found["group"]
    size = 0 if number is None else data[groups[number][0]].size
    tensor = Tensor(str(found["name"]), str(found["type"]), ne, nb, Memory(number or 0, size, writable), offset)
    if min(*ne, *nb, offset) < 0 or max(*ne, *nb) > _LIMIT or ne[0] % tensor.codec.block_size:
        raise ValueError(f"tensor {tensor.name!r} of {tensor.type} has ne {ne}, nb {nb}, offset {offset}")
    if offset + tensor.nbytes > size:
        raise ValueError(f"tensor {tensor.name!r} ends at byte {offset + tensor.nbytes} of {size}")
    if not found.get("packed"):
        return tensor
    if tensor.type not in PACKED_TYPES or size % tensor.codec.block_bytes:
        raise ValueError(f"tensor {tensor.name!r} of {tensor.type}, {size} bytes: has no layout of the device's")
    return replace(tensor, packed=Packed(tensor.type, 0, np.empty(0, np.uint8)))


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
    return default_backend().refusal(node) is None


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
            self._result, self._node = node.dst, Copied.of(node).node
        return True  # one that runs together with nodes behind it would not be there when they are asked for

    def after(self, _: int) -> None:
        if self._node is not None:
            self._take(Recorded(self._node, span(self._result), self.step, self._index))

    def finish(self) -> None:
        """After the last node."""


class _CaptureTogether(_Capture):
    """Takes down the selected nodes as those of one operator."""

    def __init__(self, ggml: lib.Ggml, select: Callable[[int, int, Node], bool], take: Callable[[Recorded], None]):
        super().__init__(ggml, select, take)
        self._reader, self._collected, self._last = convert.Reader(ggml), Collected(), 0
        self._expected: Bytes = np.empty(0, np.uint8)
        self._place = (0, 0)

    def before(self, address: int) -> bool:
        index = self._index
        runs = super().before(address)
        if self._index != index and self._node is not None:
            self._collected.add(self._reader(address), self._index)
            self._last = address
        return runs

    def after(self, address: int) -> None:
        if self._node is not None and address == self._last:
            self._expected, self._place = span(self._result), (self.step, self._index)

    def finish(self) -> None:
        *lead, last = self._collected.graph().nodes
        self._take(Recorded(last, self._expected, *self._place, tuple(lead)))


def capture(
    model: Path,
    prompt: str,
    path: Path,
    *,
    steps: int = 4,
    settings: Settings | None = None,
    select: Callable[[int, int, Node], bool] = taken_by_the_npu,
    options: Mapping[str, str] | None = None,
    together: bool = False,
    progress: Callable[[float], None] | None = None,
    seen: Callable[[Recorded], None] = lambda recorded: None,
) -> Captured:
    """Runs a prompt and `steps` greedy tokens on llama.cpp's CPU, and writes the selected nodes to a trace.

    settings  of the context, flash attention off where left out; device and n_ctx are set here
    select    called with a node's step, its place in that and the node; nodes of no elements are left out
    options   of the NPU that a replay is to have; those of the default backend, where left out
    together  whether the selected nodes are those of one operator
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
    backend = default_backend()
    settings = replace(settings or Settings(flash_attention="off"), device="cpu", n_ctx=context_for(prompt, steps))
    ops = Counter[str]()

    def take(recorded: Recorded) -> None:
        writer.add(recorded)
        ops[recorded.node.op] += 1
        seen(recorded)

    observer = _Capture(ggml, select, take)
    if together:
        observer = _CaptureTogether(ggml, select, take)
    with Session(model, settings, observer=observer, progress=progress) as session:
        threads = settings.threads or os.cpu_count() or 1
        chosen = dict(options or backend.options.to_compare.chosen())
        origin = Origin(session.description, prompt, "CPU", ggml.version, backend.numerics.rounding, threads, chosen)
        with TraceWriter(path, origin) as writer:
            session.decode(session.tokenize(prompt))
            for _ in range(steps):
                token = Sampler()(session.logits())
                observer.next_step()
                session.decode([token])
            observer.finish()
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


def replay(
    path: Path,
    device: str | None = None,
    *,
    backend: Backend | None = None,
    rules: Rules | None = None,
    repeat: int = 1,
    seen: Callable[[NodeResult], None] = lambda node: None,
    about_to: Callable[[str, int, int, Node | None], None] = lambda how, step, place, node: None,
) -> ReplayResult:
    """Computes each node of a trace on a device and compares with what is expected.

    device  "NPU": the kernels of a backend, without llama.cpp; any other that ggml has. Left out: the NPU, and the CPU
            where the results are the NPU's
    backend  what the NPU is; the default one, where left out
    repeat  how often each is computed at the same addresses, with other values in its sources in between: what a kernel
            keeps of an earlier call shows
    seen    called with each node's result
    about_to  called before the device computes a node, as `diff` calls it

    Raises TraceError for a file that is no whole trace, KernelError for a device that ggml has not.
    """
    trace = read_trace(path)
    device = device or ("CPU" if trace.origin.device == NPU else NPU)
    rules = rules or Rules()
    with _computer(device, backend or default_backend(), trace) as computer:
        result = ReplayResult(str(path), computer.name, trace.origin)
        for recorded in trace:
            refusals = [(node.op, computer.refusal(node)) for node in recorded.graph.nodes]
            refused = [(op, reason) for op, reason in refusals if reason is not None]
            if refused:
                result.refused[refused[0]] += 1
                continue
            about_to("isolated", recorded.step, recorded.index, recorded.node)
            result.nodes.append(_replayed(recorded, computer, rules, repeat))
            about_to("", 0, 0, None)
            seen(result.nodes[-1])
    return result


@contextmanager
def _computer(device: str, backend: Backend, trace: Trace) -> Iterator[Backend | Replica]:
    if device.upper() != NPU:
        with Replica(lib.ggml(), device, threads=trace.origin.threads) as replica:
            yield replica
        return
    like = backend.like(NPU, options=backend.options.to_compare)
    like.numerics = replace(backend.numerics, rounding=trace.origin.rounding)
    like.team = replace(backend.team, size=trace.origin.threads)
    yield like


def _replayed(recorded: Recorded, computer: Backend | Replica, rules: Rules, repeat: int) -> NodeResult:
    """The first of the runs that is wrong, or the last one."""
    nodes = recorded.graph.nodes
    memories = {
        tensor.memory.address: tensor.memory
        for node in nodes
        for tensor in (node.dst, *node.src)
        if tensor is not None and tensor.nbytes
    }
    held = {address: memory.bytes().copy() for address, memory in memories.items()}
    found: NodeResult | None = None
    repeated = repeat > 1
    while repeat > 0 and (found is None or found):
        repeat -= 1
        for disturbed in _order(repeat) if repeated else (False,):
            for address, memory in memories.items():
                memory.bytes()[:] = held[address]
            if disturbed:
                _disturb(recorded)
                with suppress(Exception):
                    computer.compute_graph(recorded.graph)
            elif found is None or found:
                found = _compared(recorded, computer, rules, held)
    assert found is not None
    return found


def _order(run: int) -> tuple[bool, ...]:
    """Which calls of one round are disturbed ones: no two rounds are alike, so that no period is met."""
    return True, *[False] * (2 + run % 3), *[True] * (run % 2)


def _disturb(recorded: Recorded) -> None:
    """Halves what sources of float types hold: other values, as good as theirs."""
    for node in recorded.graph.nodes:
        for source in node.src:
            if source is not None and source.type == "f32" and source.nbytes and source.packed is None:
                view = replace(source, memory=replace(source.memory, writable=True)).view()
                with np.errstate(all="ignore"):
                    view[...] *= 0.5


def _compared(recorded: Recorded, computer: Backend | Replica, rules: Rules, held: dict[int, Bytes]) -> NodeResult:
    node, graph = recorded.node, recorded.graph
    before = {id(source): span(source) for each in graph.nodes for source in each.src if source is not None}
    saved = replace(node, src=tuple(_over(source, before) for source in node.src))
    if not recorded.lead and not continues_dst(node):
        blank(node.dst)
    around = held | {node.dst.memory.address: node.dst.memory.bytes().copy()}
    failure, comparison, verdict = None, None, Verdict.FAILED
    try:
        computer.compute_graph(graph)
    except Exception as error:
        failure = failure_of(error)
    if failure is None:
        outside = _wrote_outside(graph, around)
        results = [(recorded.reference, node.dst), *((_as(t, data), t) for t, data in recorded.wanted)]
        verdicts = []
        for expected, actual in results:
            found = compare(expected, actual.unpacked(), outside)
            right = bool(found) or rules.allows(saved, expected, actual.unpacked(), found)
            verdicts.append(Verdict.EXACT if found else Verdict.ROUNDING if right else Verdict.INTRODUCED)
            comparison = found if comparison is None or not right else comparison
        verdict = max(verdicts, key=list(Verdict).index)
    return NodeResult(
        recorded.step, recorded.index, node.op, node.name, types_of(node), node.dst.ne, verdict,
        isolated=comparison, failure=failure,
    )  # fmt: skip


def _over(source: Tensor | None, held: dict[int, Bytes]) -> Tensor | None:
    """A source over what it held."""
    return None if source is None else _as(source, held[id(source)])


def _as(tensor: Tensor, data: Bytes) -> Tensor:
    return replace(tensor, memory=Memory.of(data), offset=0, packed=None)


def _wrote_outside(graph: Graph, before: dict[int, Bytes]) -> bool:
    """Whether bytes are others than before that lie in no output: around them, or in sources."""
    changed = {address: held != Memory(address, held.size).bytes() for address, held in before.items()}
    for node in graph.nodes:
        if node.dst.memory.address in changed:
            begin = 0 if node.dst.packed is not None else node.dst.offset
            end = None if node.dst.packed is not None else node.dst.offset + node.dst.nbytes
            changed[node.dst.memory.address][begin:end] = False
    return any(bool(flags.any()) for flags in changed.values())
