"""Runs the work of commands with untrusted kernels in a child process, and makes a result of it if the child ends."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import printable
from graph_runner.base.errors import EndedElsewhereError, SessionError, TraceError
from graph_runner.base.files import folder_for_traces
from graph_runner.process.child import Child, EndedError, Footprint, Trail, begun
from quant.folders import FolderError

if TYPE_CHECKING:
    from ggml_backend_npu import AnyBackend
    from graph_runner.diff.result import DiffResult
    from graph_runner.diff.run import DiffOptions
    from graph_runner.judging.results import NodeResult
    from graph_runner.run.devices import Devices
    from graph_runner.trace import ReplayResult


@dataclass(frozen=True)
class NpuOptions:
    """The device's options by field name, and a user's kernel files."""

    options: dict[str, str | None]
    kernels: tuple[Path, ...] = ()

    def use(self, *, tells: bool = True) -> AnyBackend:
        """Sets up the default backend and returns it.

        tells  whether to say on stderr what the kernel files registered
        """
        from ggml_backend_npu.backend.kernel_files import load_kernels
        from ggml_backend_npu.default import only_backend

        backend = only_backend()
        chosen = backend.options.updated(self.options)
        chosen.check()
        backend.options = chosen
        for path in self._files:
            ops = ", ".join(f"{name} ({how})" for name, how in load_kernels(path, backend).items())
            if tells:
                print(printable(f"kernels of {path}: {ops}"), file=sys.stderr)
        return backend

    @property
    def _files(self) -> Sequence[Path]:
        from ggml_backend_npu.backend.kernel_files import named_by_the_environment

        return self.kernels or named_by_the_environment()

    @property
    def described(self) -> dict[str, str]:
        """The kernel files with their SHA-256 and the device's file, as a trace and a report name them."""
        texts = [f"{path} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in self._files]
        given = {"kernels": ", ".join(texts), "device_file": os.environ.get("GGML_NPU_DEVICE_FILE", "")}
        return {name: text for name, text in given.items() if text}


@dataclass(frozen=True)
class DiffJob:
    """A diff.

    options  all that is known before the device's process runs: not the backend, and what is asked of its ops
    ops      names of ops, as the user writes them
    rules    the file of rules
    """

    device: NpuOptions
    model: Path
    prompt: str
    options: DiffOptions
    ops: str | None = None
    rules: str | None = None

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> DiffResult:
        """Sends the result when it begins, and then each node. Returns the result, without nodes if there is a trail,
        since they have been sent."""
        from graph_runner.diff.run import chosen_ops, diff
        from graph_runner.judging.rules import Rules

        backend = self.device.use()

        ops = chosen_ops(self.ops, backend, self.options.device)
        options = replace(
            self.options, ops=ops, backend=backend, rules=Rules(self.rules, backend.op_names),
            begun=send, seen=send, notes=self.device.described | self.options.devices.described(self.options.device),
        )  # fmt: skip
        if trail is not None:
            options = replace(options, about_to=trail.about_to)
        try:
            result = diff(self.model, self.prompt, options)
        except EndedElsewhereError as error:
            if trail is None:
                raise SessionError(str(error)) from None
            raise
        return result if trail is None else replace(result, nodes=[])


def run_diff(child: Child, job: DiffJob, *, node_timeout: float, seen: Callable[[NodeResult], None]) -> DiffResult:
    """Runs a diff in a child process. If the child ends or hangs, the node that it was at has failed; if it hangs in a
    call of the device between nodes, the device's run has stopped there.

    node_timeout  seconds that the device may take for one node, and for one call of a method of it
    seen  called with each node's result

    Raises what `diff` raises, and SessionError if the child ends before any node.
    """
    from graph_runner.judging.results import NodeResult

    found: list[DiffResult] = []
    nodes: list[NodeResult] = []

    def receive(value: DiffResult | NodeResult) -> None:
        if isinstance(value, NodeResult):
            nodes.append(value)
            seen(value)
        else:
            found.append(value)
            nodes.clear()

    try:
        result: DiffResult = child.run(job, receive=receive, node_timeout=node_timeout)
    except EndedError as error:
        at = error.at if error.call else error.at or error.last  # no node is to blame for a call between nodes
        if not found or (at is None and not error.call):
            raise SessionError(f"model {str(job.model)!r}: {error.call or 'llama.cpp'} {error.reason}") from None
        result = found[-1]
        result.stopped = f"{error.call} {error.reason}"
        if at is not None:
            nodes.append(_ended(error, at, result.device, _captured(job, result, at)))
            result.stopped = nodes[-1].failure
    result.nodes = nodes
    return result


def _ended(error: EndedError, at: Footprint, device: str, reproducer: str | None) -> NodeResult:
    from graph_runner.judging.results import ISOLATED, OWN_RUN, NodeResult, Verdict

    when = " in its own run" if at.how == "own" else ""
    call = f"{error.call} " if error.call not in ("", f"{at.op} node {at.name!r}") else ""
    what = f"{call}{error.reason}{when}" if error.at else f"{error.reason} after it{when}, where no kernel ran"
    return NodeResult(
        at.step, at.place, at.op, at.name, at.types, at.ne, Verdict.FAILED, device, failure=what,
        wrong_in=OWN_RUN if at.how == "own" else ISOLATED, reproducer=reproducer,
    )  # fmt: skip


def _captured(job: DiffJob, result: DiffResult, at: Footprint) -> str | None:
    """Saves the node that ended a child, as on ggml's CPU, in the folder for reproducers."""
    folder = job.options.reproducers
    if folder is None or result.reference != "CPU" or job.options.variants:
        return None
    try:
        path = folder_for_traces(folder) / f"{at.step}-{at.place}-{at.op}.gguf"
        capture = CaptureJob(job.model, job.prompt, path, at, result, job.device.described)
        with begun("graph_runner.trace") as child:
            child.run(capture, receive=lambda _: None, node_timeout=float("inf"))
    except (EndedError, SessionError, TraceError, FolderError):
        return None
    return str(path)


@dataclass(frozen=True)
class CaptureJob:
    """Writes a trace of one node of a run on ggml's CPU, or of the nodes of a span that ends there."""

    model: Path
    prompt: str
    path: Path
    at: Footprint
    result: DiffResult
    notes: dict[str, str]

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> None:
        from ggml_backend_npu.backend.fusion import FUSIONS
        from graph_runner.trace import CaptureOptions, capture

        length = (
            next((len(each.ops) for each in FUSIONS if each.name == self.at.op), 1) if self.at.how == "fused" else 1
        )
        places = range(self.at.place - length + 1, self.at.place + 1)
        options = CaptureOptions(
            steps=self.at.step, settings=self.result.settings,
            select=lambda step, index, node: step == self.at.step and index in places,
            device_options=self.result.device_options, together=length > 1,
        )  # fmt: skip
        capture(self.model, self.prompt, self.path, options)


@dataclass(frozen=True)
class ReplayJob:
    """A replay. `arguments` are those of `graph_runner.trace.replay`.

    devices  where the device of this name is, if not the NPU's and ggml's own ones are meant
    """

    device: NpuOptions
    path: Path
    rules: str | None
    arguments: dict[str, Any] = field(default_factory=dict)
    devices: Devices | None = None

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> ReplayResult:
        import ggml_backend_npu
        from ggml_backend_npu.ggml import lib
        from graph_runner.judging.rules import Rules
        from graph_runner.trace import NPU, read_trace, replay

        recorded = read_trace(self.path).origin.options
        own = "device_file" in self.device.described  # whose options no other device's are
        chosen = {name: value for name, value in self.device.options.items() if value is not None}
        backend = replace(self.device, options={**({} if own else _known(recorded)), **chosen}).use()
        arguments = dict(self.arguments)
        if self.devices is not None:
            arguments["device"] = self.devices.named(lib.ggml(), arguments["device"])
        elif (arguments.get("device") or NPU).upper() != NPU:
            ggml_backend_npu.register(backend)  # so that it is among the devices that ggml has
        about_to = trail.about_to if trail is not None else _nothing
        return replay(
            self.path,
            backend=backend,
            rules=Rules(self.rules, backend.op_names),
            about_to=about_to,
            seen=send,
            **arguments,
        )


def _nothing(*_: object) -> None:
    pass


def _known(options: dict[str, str]) -> dict[str, str]:
    """Returns those of a trace's options that the device has; its profile only if that is not a file."""
    from ggml_backend_npu.backend.options import OPTIONS

    return {
        name: value
        for name, value in options.items()
        if name in OPTIONS and not (name == "profile" and value.endswith(".toml"))
    }


def run_replay(child: Child, job: ReplayJob, *, node_timeout: float) -> ReplayResult:
    """Runs a replay in a child process. If the child ends or hangs, the node that it was at has failed.

    node_timeout  seconds that the device may take for one node

    Raises what `replay` raises, and TraceError if the child ends before any node.
    """
    from graph_runner.trace import NPU, ReplayResult, read_trace

    nodes: list[NodeResult] = []
    try:
        result: ReplayResult = child.run(job, receive=nodes.append, node_timeout=node_timeout)
    except EndedError as error:
        at = error.at or error.last
        if at is None:
            raise TraceError(f"trace {str(job.path)!r}: {error.call or 'replaying it'} {error.reason}") from None
        device = job.arguments.get("device") or NPU
        failed = _ended(error, at, device, None)
        result = ReplayResult(str(job.path), device, read_trace(job.path).origin, [*nodes, failed])
    return result
