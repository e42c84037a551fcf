"""Times that other backends of ggml write down themselves: ggml-vulkan, ggml-opencl and ggml-hexagon.

- ggml-vulkan prints sums by op and shape after each graph (GGML_VK_PERF_LOGGER; vk_perf_logger::print_timings).
- ggml-opencl writes cl_profiling.csv, a line for each kernel that ran, with the node's name (GGML_OPENCL_PROFILING;
  write_profiling_info).
- ggml-hexagon prints a line for each node that ran, with its op and name (GGML_HEXAGON_PROFILE=1;
  ggml_hexagon_dump_op_prof).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ggml_backend_npu.user_texts import no_file
from graph_runner.base.errors import BadInputError
from graph_runner.timeline.events import NODE, Timeline, read_id
from graph_runner.timeline.table import Row

LOGS = frozenset((".log", ".csv", ".txt"))  # how a log's name ends
_VULKAN, _OPENCL, _HEXAGON = "ggml-vulkan", "ggml-opencl", "ggml-hexagon"
_OPENCL_HEAD = "op name, kernel name, exec duration (ms), global size, local size, output size"
_NUMBER = r"\d{1,18}(?:\.\d{1,18})?(?:e[+-]\d{2})?"
_SUM = re.compile(
    rf"(?P<what>.+): (?P<count>\d{{1,18}}) x \S+ us = (?P<us>{_NUMBER}) us"
    rf"(?: \((?:(?P<rate>{_NUMBER})|\S+) GFLOPS/s\))?"
)
_CONCURRENT = re.compile(r", +(?=[A-Z][A-Z_0-9]+\b)")  # between ops that ran at once; shapes have other commas
_PROFILE = re.compile(
    r"\bggml-hex: (?P<device>\S+) profile-op (?P<op>[A-Z_0-9+]+)\|(?P<names>[^|]*)\|.*\busec (?P<us>\d{1,18}) cycles "
)


@dataclass(frozen=True)
class Logged:
    """What a log says of one run of a node, or of several.

    op    by the words of the log: of ggml-opencl, the kernel
    name  of the node; "" where the log has sums
    step  counted from 0: a node that comes again begins the next one; -1 where the log has sums
    """

    device: str
    op: str
    name: str
    step: int
    count: int
    ns: float
    operations: float = 0.0


@dataclass(frozen=True)
class Log:
    """The file of a log.

    kind  the backend that wrote it
    """

    kind: str
    entries: list[Logged]

    @property
    def says(self) -> str:
        """What it has, and what not."""
        if self.kind == _VULKAN:
            return "sums by op and shape: no node has a name, or a time of its own"
        return "how long each node took, not when it began"

    @property
    def rows(self) -> list[Row]:
        """Its ops, the longest first."""
        found: dict[tuple[str, str], Row] = {}
        for entry in self.entries:
            row = found.setdefault((entry.device, entry.op), Row(entry.device, entry.op))
            row.count += entry.count
            row.ns += round(entry.ns)
            row.operations += entry.operations
        return sorted(found.values(), key=lambda row: -row.ns)


def read_log(path: Path) -> Log:
    """Reads a log, whatever else is in it. Raises BadInputError for a file that cannot be read, or has no such line."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        raise BadInputError(f"log {str(path)!r}: {no_file(path)}") from None
    except OSError as error:
        raise BadInputError(f"log {str(path)!r}: {error.strerror}") from None
    for kind, read in ((_VULKAN, _sums), (_OPENCL, _kernels), (_HEXAGON, _profiles)):
        entries = [*read(lines)]
        if entries:
            return Log(kind, entries)
    raise BadInputError(f"log {str(path)!r}: has no times of {_VULKAN}, {_OPENCL} or {_HEXAGON}")


def _sums(lines: list[str]) -> Iterator[Logged]:
    inside = False
    for line in lines:
        inside = line == "Vulkan Timings:" or (inside and not line.startswith("Total time: "))
        match = _SUM.fullmatch(line) if inside else None
        if match is not None:
            ops = [part.split()[0].partition("(")[0].removesuffix("_VEC") for part in _CONCURRENT.split(match["what"])]
            ns = 1000 * float(match["us"])
            yield Logged("Vulkan", " + ".join(ops), "", -1, int(match["count"]), ns, float(match["rate"] or 0) * ns)


def _kernels(lines: list[str]) -> Iterator[Logged]:
    if _OPENCL_HEAD not in lines:
        return
    steps = _Steps()
    for line in lines[lines.index(_OPENCL_HEAD) + 1 :]:
        name, *rest = line.rsplit(",", 5)
        if len(rest) == 5 and re.fullmatch(_NUMBER, rest[1]):
            yield Logged("OpenCL", rest[0], name, steps.of(rest[0], name), 1, 1e6 * float(rest[1]))


def _profiles(lines: list[str]) -> Iterator[Logged]:
    steps = defaultdict[str, _Steps](_Steps)
    for match in filter(None, map(_PROFILE.search, lines)):
        device, op, name = match["device"], match["op"], match["names"].rpartition(" -> ")[2]
        if op != "OPBATCH":
            yield Logged(device, op, name, steps[device].of(op, name), 1, 1000 * float(match["us"]))


class _Steps:
    """Tells steps by nodes that come again."""

    def __init__(self) -> None:
        self._step, self._last, self._seen = 0, ("", ""), set[tuple[str, str]]()

    def of(self, op: str, name: str) -> int:
        """Returns the step of the next node. A kernel that runs several times in a row is one node's."""
        if (op, name) in self._seen and (op, name) != self._last:
            self._step += 1
            self._seen.clear()
        self._last = op, name
        self._seen.add(self._last)
        return self._step


@dataclass(frozen=True)
class Same:
    """A named node of a log, and what has this name in a timeline of the same run.

    ids    in the timeline: of a node, of all that ran as one, or of several of one name; none if there is no such node
    ns     in the log
    timed  in the timeline, in ns
    """

    name: str
    ids: list[str]
    ns: float
    timed: int


def nodes_in_both(log: Log, timeline: Timeline) -> list[Same]:
    """Returns the named nodes of a log, the longest first, with their ids in a timeline. Step and name are the same,
    and the last op where the log has ops; a log of kernels does not tell nodes of one name apart: they are added up."""
    has_ops, known = log.kind != _OPENCL, defaultdict[tuple[int, str, str], dict[str, int]](dict)
    for event in timeline.of(NODE):
        for each in event.args.get("nodes", [event.args["id"]]):
            known_as = read_id(each)
            if known_as is not None:
                step, op, name = known_as
                known[step, op if has_ops else "", name][event.args["id"]] = event.duration
    times = defaultdict[tuple[int, str, str], float](float)
    for entry in log.entries:
        if entry.name:
            times[entry.step, entry.op.rpartition("+")[2] if has_ops else "", entry.name] += entry.ns
    found = []
    for key, ns in times.items():
        there = known.get(key, {})
        name = " ".join(filter(None, (f"step {key[0]}", key[1], repr(key[2]))))
        found.append(Same(name, [*there], ns, sum(there.values())))
    return sorted(found, key=lambda same: -same.ns)
