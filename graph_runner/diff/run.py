"""Runs a model on two devices in step, and tells for each node how large its error is and where the error comes from.

Each node is compared twice from equal inputs. Isolated: the device computes it again from what the reference's run
read. Mirrored: the reference computes it again from what the device's own run read, and that is compared with what the
device's run wrote. The verdict follows from both, and from how far the two runs have diverged.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggml_backend_npu import AnyBackend, Graph, Node, Tensor, default_backend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops.kernels import strided
from graph_runner.base.builds import About, Build
from graph_runner.base.console import printable
from graph_runner.base.errors import BadInputError, BlindError, SessionError, TraceError
from graph_runner.base.files import folder_for_traces
from graph_runner.base.settings import ALL_LAYERS, Gives, Settings
from graph_runner.base.variants import Variants
from graph_runner.diff.again import Again, Watched
from graph_runner.diff.canary import Planter
from graph_runner.diff.judge import Asked, Judge, OtherOrderError
from graph_runner.diff.lockstep import Batch, Lockstep
from graph_runner.diff.logits import Endings, Outputs
from graph_runner.diff.pairs import Listing, Pairs
from graph_runner.diff.result import DiffResult as DiffResult
from graph_runner.diff.side import CPU, NPU, Side, Wanted
from graph_runner.diff.sides import Sides
from graph_runner.diff.together import Computer
from graph_runner.elsewhere.session import AnySession
from graph_runner.judging.footprints import AboutTo, Footprints
from graph_runner.judging.results import NodeResult
from graph_runner.judging.rules import Rules
from graph_runner.run.devices import Devices
from graph_runner.run.session import Observer, Session
from graph_runner.trace import Origin, save_nodes
from quant.folders import FolderError
from quant.kernels.processor import processors


def _nothing(*_: object) -> None:
    """Of an observer that is not asked for: a function of a module, since options are sent to other processes."""


class _Reproducers:
    """Saves wrong nodes as traces in a folder, until that fails; saves nothing without a folder."""

    def __init__(self, folder: Path | None, origin: Origin) -> None:
        self._folder, self.origin = folder, origin

    def node(self, node: Node, expected: Tensor, found: NodeResult) -> str | None:
        """Saves a node as it was before it ran, with its expected output. Returns the path, or None."""
        return self._save(Graph((node,)), {0: expected}, found)

    def span(self, graph: Graph, expected: dict[int, Tensor], found: NodeResult) -> str | None:
        """Saves nodes that run as one operator, as they were before, with the expected outputs by place. Returns the
        path, or None."""
        return self._save(graph, expected, found)

    def _save(self, graph: Graph, expected: dict[int, Tensor], found: NodeResult) -> str | None:
        if self._folder is None:
            return None
        name = f"{found.step}-{found.index}-{found.op}.gguf"
        try:
            path = folder_for_traces(self._folder) / name
            save_nodes(path, graph, expected, self.origin, step=found.step, index=found.index)
        except (TraceError, FolderError) as error:
            self._folder = None
            print(printable(f"ggml-npu: wrong nodes are not kept: {error}"), file=sys.stderr)
            return None
        return str(path)


@dataclass(frozen=True)
class DiffOptions:
    """How two devices are compared.

    steps      greedy tokens to decode after the prompt
    settings   of the contexts, with flash attention off if omitted; device and n_ctx are set here
    ops        names of the ops and fusions to compute again from the reference's inputs; all if omitted
    reference  "CPU"; "NPU": the project's own kernels, node by node; or a device of ggml's that works in host memory
    device     "NPU": `backend`; "CPU"; or any device of ggml's, by the name that ggml gives it
    variants   settings that only one of them has
    devices    where such devices are, besides those that ggml has by itself
    backend    a backend of this project, whose name pages call the device by; the default backend if omitted
    rules      which differences are right; the built-in rules if omitted
    reproducers  a folder for traces of the first wrong nodes of each op and type
    strict     check every buffer of the device's own run after every node, not only what the node reads
    repeat     how often the device runs the tokens; a node whose result changes between runs is wrong
    progress   called with 0..1 while the model loads
    seen       called with each node's result
    about_to   called before the device computes a node, with how ("isolated", "own", "fused N"), step, place and node;
               and with how "" after it
    begun      called with the result before it has any nodes
    canary     seed of the faults that are planted into copies of results; drawn if omitted
    strict_coverage  the result is falsy too if no node could have shown that a parameter is ignored
    see        whether synthetic nodes show what no node of the run could have shown
    notes      additions to `device_options`: a user's kernel files
    """

    steps: int = 4
    settings: Settings | None = None
    ops: Collection[str] | None = None
    reference: str = "CPU"
    device: str = "NPU"
    variants: Variants = field(default_factory=Variants)
    devices: Devices = field(default_factory=Devices)
    backend: AnyBackend | None = None
    rules: Rules | None = None
    reproducers: Path | None = None
    strict: bool = False
    repeat: int = 1
    progress: Callable[[float], None] | None = None
    seen: Callable[[NodeResult], None] = _nothing
    about_to: AboutTo = _nothing
    begun: Callable[[DiffResult], None] = _nothing
    canary: int | None = None
    notes: Mapping[str, str] | None = None
    strict_coverage: bool = False
    see: bool = False


_DEFAULT = DiffOptions()


def diff(model: Path, prompt: str, options: DiffOptions = _DEFAULT) -> DiffResult:
    """Runs `run_in_step`. If the run is wrong but no node is, runs it again and checks every buffer after every
    node."""
    result = run_in_step(model, prompt, options)
    if options.strict or not result.is_unexplained or result.faults or result.hazards or options.device == CPU:
        return result
    again = run_in_step(model, prompt, replace(options, strict=True))
    return result if again else again


def run_in_step(model: Path, prompt: str, options: DiffOptions = _DEFAULT) -> DiffResult:
    """Runs a prompt and greedy tokens on two devices in step, and compares every node.

    Matrices are multiplied as on ggml's CPU, unless the backend's options say otherwise. Raises SessionError for a
    model or settings that llama.cpp refuses.
    """
    try:
        return _InStep(model, prompt, options).run()
    except OtherOrderError:
        return _InStep(model, prompt, options, moves=True).run()


class _InStep:
    """A model on two sides, and the result so far.

    ours   the backend that options apply to, as it is compared
    moves  whether one side runs the nodes in another order than the other
    """

    def __init__(self, model: Path, prompt: str, asked: DiffOptions, *, moves: bool = False) -> None:
        self._model, self._prompt, self._asked, self._moves = model, prompt, asked, moves
        self._ggml = ggml = lib.ggml()
        given = asked.backend or default_backend()
        self._ours = ours = given.like(options=given.options.to_compare)
        strided.make_ready()
        settings = asked.settings or Settings(flash_attention="off")
        self._layers = layers = ALL_LAYERS if settings.gpu_layers is None else settings.gpu_layers
        self._settings = replace(
            settings.holding(prompt, asked.steps), threads=settings.threads or processors(),
            gpu_layers=layers if ours.options.device_type == "gpu" else 0,
        )  # fmt: skip
        is_ours = NPU in (asked.device, asked.reference)
        self._options = (ours.options.chosen() if is_ours else {}) | dict(asked.notes or {})
        origin = Origin(
            "", prompt, asked.reference, ggml.version, ours.numerics.rounding, self._settings.threads, self._options
        )
        self._keeper = _Reproducers(None if asked.reference == asked.device == CPU else asked.reproducers, origin)
        self._rules = asked.rules or Rules()
        self._sides: Sides
        self._result: DiffResult

    def run(self) -> DiffResult:
        """Runs the tokens on both devices, and again if nothing is wrong."""
        build = self._asked.variants.reference.build
        if build not in (None, Build.of_this_process()):
            raise BadInputError(f"reference of {build.where}: this process has another llama.cpp")
        asked = self._asked
        with ExitStack() as closing:
            wanted = Wanted(
                self._ggml, asked.reference, asked.device, is_reference=False, settings=self._settings,
                layers=self._layers, variants=asked.variants, devices=asked.devices, ours=self._ours, closing=closing,
            )  # fmt: skip
            self._sides = Sides.of(wanted)
            return self._run()

    def _run(self) -> DiffResult:
        device = self._sides.device
        pairs = self._pairs()
        judge = self._judge(pairs)
        with ExitStack() as stack:
            lockstep = stack.enter_context(Lockstep(device, judge))
            first, second = self._sessions(stack, lockstep)
            self._keeper.origin = replace(self._keeper.origin, model=first.description)
            tokens = first.prompts(self._prompt)
            n_steps = first.n_steps(self._asked.steps)
            self._result = result = self._begin(first.description, [*map(len, tokens)], n_steps, judge)
            result.notes = pairs.notes(result.reference, result.device)
            self._asked.begun(result)
            text, endings = self._decode(first, second, lockstep, judge, tokens)
            result.text = b"".join(first.piece(each[0][0]) for each in text).decode(errors="replace")
            result.stopped = lockstep.stopped
            result.spoilt = judge.watch.found
            result.counted = device.n_computed
            result.notes += device.notes
            result.order = judge.order.reports()
            if result.stopped is None:
                elsewhere = f"another process runs the graphs of {result.device}"
                result.order_unknown = elsewhere if device.runs_elsewhere else ""
        device.forgets()
        if self._asked.see and result.stopped is None and not result.faults:
            judge.see(n_steps)
        result.sights = judge.blindness.sights
        self._refuse_a_blind_judge(judge.planter)
        if result.stopped is None:
            result.ending = endings.ending()
        elif device.foreign is not None and not result.wrong:
            self._run_unobserved([tokens, *text])
        if result.stopped is None and not result.wrong and not result.faults and not result.hazards:
            self._look_again([tokens, *text], endings, judge.fingerprints, is_one_graph=not pairs.differ)
        return result

    def _refuse_a_blind_judge(self, planter: Planter) -> None:
        """Raises BlindError if a planted fault was called right, or if this diff would be right with one."""
        result = self._result
        result.canaries = planter.found
        planter.found.refuse_a_blind_judge()
        if planter.example is not None and replace(result, nodes=[*result.nodes, planter.example]):
            raise BlindError(f"the judge is blind: it calls a diff right in which {planter.found.named} is wrong")

    def _add(self, node: NodeResult) -> None:
        self._result.nodes.append(node)
        self._asked.seen(node)

    def _pairs(self) -> Pairs:
        """Returns which nodes of the two graphs are the same. If settings make them differ, or one side moves nodes,
        runs tokens on both to see the graphs."""
        has_two = self._asked.variants.has("flash-attn") or (self._moves and self._sides.device.is_elsewhere)
        if not has_two and not self._moves:
            return Pairs()
        listed = []
        for side in (self._sides.device, self._sides.reference):
            listing = Listing(self._ggml, is_one_graph=not has_two)
            listing.side = side
            with self._session(side.runs_with(self._settings), listing, side) as session:
                session.decode(*session.prompts(self._prompt))
                for _ in range(session.n_steps(self._asked.steps) - 1):
                    listing.next_step()
                    session.decode(*session.next_tokens())
            listed.append(listing)
            if self._sides.reference.is_cpu:
                self._settings = replace(self._settings, without=session.lacks)
        return Pairs.of(*reversed(listed), moves=self._moves)

    def _judge(self, pairs: Pairs) -> Judge:
        asked, device = self._asked, self._sides.device
        ops = device.ops if asked.ops is None else asked.ops
        footprints = Footprints(self._about_to)
        seed = secrets.randbits(32) if asked.canary is None else asked.canary
        wanted = Asked(self._rules, ops, asked.strict, self._keeper, self._add, footprints, seed, pairs)
        return Judge(self._ggml, self._sides, wanted)

    def _about_to(self, how: str, step: int, place: int, node: Node | None) -> None:
        checks = self._sides.device.checks
        if checks is not None and how:
            where = "in the own run" if how == "own" else "alone"
            checks.when = f"step {step}, when node {place} ran {where}"
        self._asked.about_to(how, step, place, node)

    def _sessions(self, stack: ExitStack, lockstep: Lockstep) -> tuple[Session, AnySession]:
        """Returns the reference's session and the device's."""
        sides = self._sides
        on_device = sides.device.runs_with(self._settings)
        second = stack.enter_context(self._opened(on_device, lockstep.device))
        if sides.reference.is_cpu:
            self._settings = replace(self._settings, without=second.lacks)
        on_reference = sides.reference.runs_with(self._settings)
        first = stack.enter_context(self._session(on_reference, lockstep.reference, sides.reference))
        assert isinstance(first, Session)
        return first, second

    def _opened(self, settings: Settings, observer: Observer | None) -> AnySession:
        """Opens a session on the device, or on llama.cpp's CPU if the settings say so."""
        return self._session(settings, observer, self._sides.device)

    def _session(self, settings: Settings, observer: Observer | None, side: Side) -> AnySession:
        return side.session(self._model, settings, observer, self._asked.progress)

    def _begin(self, description: str, lengths: list[int], n_steps: int, judge: Judge) -> DiffResult:
        """Returns the result before any node."""
        asked = self._asked
        return DiffResult(
            model=str(self._model),
            description=description,
            reference=self._sides.reference.name,
            device=self._sides.device.name,
            prompt=self._prompt,
            text="",
            n_prompt=lengths[0],
            lengths=lengths,
            steps=n_steps - 1,
            settings=self._settings,
            ggml=self._ggml.version,
            rounding=self._ours.numerics.rounding,
            device_options=self._options,
            strict=asked.strict,
            states=judge.state_results,
            strays=judge.strays,
            faults=judge.faults,
            ops=asked.ops,
            refused=judge.refused,
            see=asked.see,
            strict_coverage=asked.strict_coverage,
            variants=asked.variants,
            builds=self._builds(),
            is_scheduled=self._sides.device.is_scheduled,
        )

    def _builds(self) -> tuple[About, About] | None:
        about = self._sides.device.about
        return None if about is None else (About.of_this_process(self._ggml), about)

    def _decode(
        self, first: Session, second: AnySession, lockstep: Lockstep, judge: Judge, tokens: Batch
    ) -> tuple[list[Batch], Endings]:
        """Runs the prompts and the greedy tokens after them. Returns these tokens, and what both runs give after each
        step."""
        text: list[Batch] = []
        endings = Endings()
        lockstep.decode(first, second, tokens)
        for step in range(self._result.steps + 1):
            if lockstep.stopped is None:
                endings.add(first.outputs(), second.outputs(), first.gives)
            if step == self._result.steps:
                break
            text.append(first.next_tokens())
            judge.next_step(stopped=lockstep.stopped is not None)
            lockstep.decode(first, second, text[-1])
        judge.finish(stopped=lockstep.stopped is not None)
        if lockstep.stopped is None:
            judge.end()
        return text, endings

    def _run_unobserved(self, batches: list[Batch]) -> None:
        """Runs tokens on both sides once more, unobserved, after the device's run has stopped where it was observed: a
        device may run nothing but whole graphs."""
        result, sides, endings = self._result, self._sides, Endings()
        try:
            runs = [self._given(side, batches) for side in (sides.reference, sides.device)]
        except SessionError:
            return
        for (reference, of), (device, _) in zip(*runs, strict=True):
            endings.add(reference, device, of)
        result.ending = self._again(batches, endings, {}).natural(endings.ending())
        result.remarks = [f"{result.device} runs to the end if no node is observed; what follows is of such a run"]

    def _given(self, side: Side, batches: list[Batch]) -> list[tuple[Outputs, Gives]]:
        """Returns what each step of a side's run gives if nobody observes it."""
        found = []
        with self._session(side.runs_with(self._settings), None, side) as session:
            for tokens in batches:
                session.decode(*tokens)
                found.append((session.outputs(), session.gives))
        return found

    def _again(self, batches: list[Batch], endings: Endings, fingerprints: dict[tuple[int, int], int]) -> Again:
        first, second = ([pair[side] for pair in endings.steps] for side in (0, 1))
        return Again(
            self._ggml, self._opened, self._sides.device,
            Computer(self._sides.reference, self._rules, Footprints(self._about_to)), self._settings, batches,
            Watched(second, first, fingerprints, self._result.nodes, endings.of),
        )  # fmt: skip

    def _look_again(
        self, batches: list[Batch], endings: Endings, fingerprints: dict[tuple[int, int], int], *, is_one_graph: bool
    ) -> None:
        """Checks whether the device gives right results again, and also if it is not observed, unless it is ggml's CPU;
        and how far rounding alone would move the ending if it is off, unless the two have other graphs."""
        result, sides = self._result, self._sides
        again = self._again(batches, endings, fingerprints)
        found = None if sides.device.is_cpu else again.repeated(self._asked.repeat)
        if found is None and sides.reference.is_cpu and not sides.device.is_cpu and not result.is_unexplained:
            with nullcontext() if sides.device.checks is None else sides.device.checks.paused():
                found = again.unwatched()
            result.is_unobserved = True
        result.remarks = again.remarks
        if found is not None:
            self._add(found)
        elif result.ending is not None and result.ending.nmse > 0 and is_one_graph:
            result.ending = again.natural(result.ending)


def chosen_ops(ops: str | None, backend: AnyBackend, device: str = NPU) -> set[str] | None:
    """Returns the names of ops and fusions in a comma-separated text: of a backend, or of ggml if the device is another
    one. Raises BadInputError for an unknown one."""
    if ops is None:
        return None
    ours = {*backend.op_names, *(fusion.name for fusion in backend.fusions)}
    known = {name.upper(): name for name in (ours if device in (CPU, NPU) else lib.ggml().op_names)}
    chosen = {name.strip().upper() for name in ops.split(",") if name.strip()}
    unknown = sorted(chosen - set(known)) or ([ops] if not chosen else [])
    if unknown:
        raise BadInputError(f"unknown op {unknown[0]!r} in --ops; the backend has: {' '.join(sorted(known.values()))}")
    return {known[name] for name in chosen}
