"""Runs a model on two devices in step, and tells of each node what it is off by, and where that comes from.

Each node is looked at from equal inputs, twice. Isolated: the device computes it again from what the reference's run
read. Mirrored: the reference computes it again from what the device's own run read, and that is compared with what the
device's run wrote. Of the two, and of how far the runs have come apart, follows the verdict.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ggml_backend_npu import Backend, Graph, Node, Tensor, default_backend
from ggml_backend_npu.abi import lib
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.abi.replica import Replica
from ggml_backend_npu.ops import strided
from graph_runner.again import Again
from graph_runner.console import printable
from graph_runner.errors import BadInputError, TraceError
from graph_runner.judge import Judge, Stray
from graph_runner.lockstep import Lockstep
from graph_runner.logits import Ending, Endings
from graph_runner.results import NodeResult
from graph_runner.rules import Rules
from graph_runner.session import DeviceName, Observer, Sampler, Session, Settings, context_for
from graph_runner.state import StateResult
from graph_runner.trace import Origin, save_nodes

AboutTo = Callable[[str, int, int, Node | None], None]


@dataclass
class DiffResult:
    """A diff of one model. Falsy where a node or anything else of the device's own run is wrong, or no node
    was compared.

    nodes    all of the run, in order; the spans among them
    states   cells of caches and recurrent states that are not the reference's, when they came to be
    strays   what was found to hold something else than the last node had written into it
    ending   how far apart the two runs end; None where the device's ended early
    stopped  why the device's own run ended before the reference's, or None
    refused  nodes of the chosen ops that the device does not take, by op and reason
    device_options  of the NPU, by name
    strict   whether every buffer of the own run was looked at after every node
    """

    model: str
    description: str
    reference: str
    device: str
    prompt: str
    text: str
    n_prompt: int
    steps: int
    settings: Settings
    ggml: str
    rounding: str
    device_options: dict[str, str]
    strict: bool = False
    nodes: list[NodeResult] = field(default_factory=list)
    states: list[StateResult] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    ending: Ending | None = None
    stopped: str | None = None
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def stray(self) -> list[StateResult]:
        """Cells that no node wrote which writes there."""
        return [state for state in self.states if state.node is None]

    @property
    def compared(self) -> list[NodeResult]:
        """Those that the device computed by itself, from the reference's inputs."""
        return [node for node in self.nodes if node.compared]

    @property
    def wrong(self) -> list[NodeResult]:
        """Those that introduce an error, and those that failed."""
        return [node for node in self.nodes if not node]

    @property
    def is_unexplained(self) -> bool:
        """Whether the run is wrong, and no node is, or not before something was found to be written by none."""
        first = min(((node.step, node.index) for node in self.wrong), default=None)
        off = bool(self.stray) or (self.ending is not None and not self.ending)
        found = [(stray.step, stray.index) for stray in self.strays]
        return (first is None and off) or (bool(found) and (first is None or min(found) <= first))

    def __bool__(self) -> bool:
        off = self.wrong or self.strays or self.stray or (self.ending is not None and not self.ending)
        return bool(self.compared) and not off and self.stopped is None


class _Reproducers:
    """Keeps wrong nodes as traces in a folder, for as long as it can be written; nothing where there is none."""

    def __init__(self, folder: Path | None, origin: Origin) -> None:
        self._folder, self.origin = folder, origin

    def node(self, node: Node, expected: Tensor, found: NodeResult) -> str | None:
        """A node as it was before it ran, and what it is to give."""
        return self._save(Graph((node,)), {0: expected}, found)

    def span(self, graph: Graph, expected: dict[int, Tensor], found: NodeResult) -> str | None:
        """Nodes that run as one operator, as they were before, and what they are to give, by place."""
        return self._save(graph, expected, found)

    def _save(self, graph: Graph, expected: dict[int, Tensor], found: NodeResult) -> str | None:
        if self._folder is None:
            return None
        path = self._folder / f"{found.step}-{found.index}-{found.op}.gguf"
        try:
            save_nodes(path, graph, expected, self.origin, step=found.step, index=found.index)
        except TraceError as error:
            self._folder = None
            print(printable(f"ggml-npu: wrong nodes are not kept: {error}"), file=sys.stderr)
            return None
        return str(path)


def diff(model: Path, prompt: str, *, strict: bool = False, **options: Any) -> DiffResult:
    """As `run_in_step`; where a run is wrong and no node is, once more with every buffer looked at after every node."""
    result = run_in_step(model, prompt, strict=strict, **options)
    if strict or not result.is_unexplained or result.device != "NPU":
        return result
    again = run_in_step(model, prompt, strict=True, **options)
    return result if again else again


def run_in_step(
    model: Path,
    prompt: str,
    *,
    steps: int = 4,
    settings: Settings | None = None,
    ops: Collection[str] | None = None,
    reference: str = "CPU",
    device: str = "NPU",
    backend: Backend | None = None,
    rules: Rules | None = None,
    reproducers: Path | None = None,
    strict: bool = False,
    repeat: int = 1,
    progress: Callable[[float], None] | None = None,
    seen: Callable[[NodeResult], None] = lambda node: None,
    about_to: AboutTo = lambda how, step, place, node: None,
    begun: Callable[[DiffResult], None] = lambda result: None,
    notes: Mapping[str, str] | None = None,
) -> DiffResult:
    """Runs a prompt and `steps` greedy tokens on two devices in step, and compares every node.

    settings   of the contexts, flash attention off where left out; device and n_ctx are set here
    ops        names of the ops and fusions to compute again from the reference's inputs; all, where left out
    reference  "CPU", or "NPU": the project's own kernels, node by node
    device     "NPU", or "CPU"
    backend    what the NPU is; the default one, where left out
    reproducers  a folder in which the first wrong nodes of each op and type are saved, as traces
    strict     look at every buffer of the device's own run after every node, not only at what the node reads
    repeat     how often the device runs the tokens: a node that is not the same each time is wrong
    progress   called with 0..1 while the model loads
    seen       called with each node's result
    about_to   called before the device computes a node, with how ("isolated", "own", "fused N"; "" when it has), step,
               place and node
    begun      called with the result before it has any nodes
    notes      what `device_options` says besides: a user's kernels

    Matrices are multiplied as ggml's CPU does, unless the backend's options say how. Raises SessionError for a model or
    settings that llama.cpp refuses.
    """
    ggml = lib.ggml()
    given = backend or default_backend()
    ours = given.like(options=given.options.to_compare)
    theirs = Backend("NPU's own kernels", options=replace(ours.options, fusion="off"), numerics=given.numerics)
    strided.make_ready()

    def add(node: NodeResult) -> None:
        result.nodes.append(node)
        seen(node)

    npus = [Plugin(ggml, each) if name == "NPU" else None for name, each in ((reference, theirs), (device, ours))]
    fuses = device == "NPU" and ours.fuses
    if ops is None and device == "NPU":
        ops = _names(ours)
    threads = (settings and settings.threads) or os.cpu_count() or 1
    chosen = replace(
        settings or Settings(flash_attention="off"), n_ctx=context_for(prompt, steps), threads=threads,
        gpu_layers=_ALL_LAYERS if ours.options.device_type == "gpu" else 0,
    )  # fmt: skip
    options = ours.options.chosen() | dict(notes or {})
    rounding = ours.numerics.rounding
    keeper = _Reproducers(reproducers, Origin("", prompt, reference, ggml.version, rounding, threads, options))

    def opened(settings: Settings, observer: Observer | None, npu: Plugin | None = npus[1]) -> Session:
        return Session(model, settings, npu=npu, observer=observer, counts_nodes=False, progress=progress)

    with ExitStack() as stack:
        cpu = stack.enter_context(Replica(ggml, "CPU", threads=threads))
        memory = npus[1].memory if npus[1] is not None else None
        packs = memory is not None and memory.packs
        judge = Judge(
            ggml, npus[1], ours, ours if device == "NPU" else cpu, theirs if reference == "NPU" else cpu, ops,
            rules or Rules(), add, fuses=fuses, packs=packs, strict=strict,
            keep=keeper, about_to=about_to,
        )  # fmt: skip
        steps_of = stack.enter_context(Lockstep(npus[1], judge))
        second = stack.enter_context(opened(replace(chosen, device=_DEVICES[device]), steps_of.device))
        if reference == "CPU":
            chosen = replace(chosen, without=second.lacks)
        on_reference = replace(chosen, device=_DEVICES[reference])
        first = stack.enter_context(opened(on_reference, steps_of.reference, npus[0]))
        keeper.origin = replace(keeper.origin, model=first.description)
        tokens = first.tokenize(prompt)
        result = DiffResult(
            model=str(model),
            description=first.description,
            reference=reference,
            device=device,
            prompt=prompt,
            text="",
            n_prompt=len(tokens),
            steps=steps,
            settings=chosen,
            ggml=ggml.version,
            rounding=rounding,
            device_options=options,
            strict=strict,
            states=judge.state_results,
            strays=judge.strays,
            refused=judge.refused,
        )
        begun(result)
        endings = Endings()
        text: list[int] = []
        steps_of.decode(first, second, tokens)
        for step in range(steps + 1):
            if steps_of.stopped is None:
                endings.add(first.logits(), second.logits())
            if step == steps:
                break
            text.append(Sampler()(first.logits()))
            judge.next_step(stopped=steps_of.stopped is not None)
            steps_of.decode(first, second, text[-1:])
        judge.finish(stopped=steps_of.stopped is not None)
        result.text = b"".join(map(first.piece, text)).decode(errors="replace")
        result.stopped = steps_of.stopped
        stack.close()
        if result.stopped is None:
            result.ending = endings.ending()
        if result.stopped is None and device == "NPU" and not result.wrong:
            batches = [tokens, *([token] for token in text)]
            _look_again(result, Again(ggml, opened, ours, chosen, batches), endings, judge.fingerprints, repeat, add)
    return result


def _look_again(
    result: DiffResult,
    again: Again,
    endings: Endings,
    fingerprints: dict[tuple[int, int], int],
    repeat: int,
    add: Callable[[NodeResult], None],
) -> None:
    """Whether the device gives the same again, and when nobody looks on; what an ending that is off would be like by
    rounding alone."""
    first, second = ([pair[side] for pair in endings.steps] for side in (0, 1))
    found = again.repeated(fingerprints, repeat, fuses=result.device_options["fusion"] == "on")
    if found is None and result.reference == "CPU" and not result.is_unexplained:
        found = again.unwatched(second, first, fingerprints)
    if found is not None:
        add(found)
    elif result.ending is not None and result.ending.nmse > 0:
        result.ending = again.natural(result.ending, first, result.nodes)


_ALL_LAYERS = 999
_DEVICES: dict[str, DeviceName] = {"CPU": "cpu", "NPU": "npu"}


def _names(backend: Backend) -> set[str]:
    return {*backend.ops, *(fusion.name for fusion in backend.fusions)}


def chosen_ops(ops: str | None, backend: Backend) -> set[str] | None:
    """Names of a backend's ops and fusions out of a text with commas between them. Raises BadInputError for one that
    it does not have."""
    if ops is None:
        return None
    known = {name.upper(): name for name in _names(backend)}
    chosen = {name.strip().upper() for name in ops.split(",") if name.strip()}
    unknown = sorted(chosen - set(known)) or ([ops] if not chosen else [])
    if unknown:
        raise BadInputError(f"unknown op {unknown[0]!r} in --ops; the backend has: {' '.join(sorted(known.values()))}")
    return {known[name] for name in chosen}
