"""Records a run of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from ggml_backend_npu import AnyBackend
from ggml_backend_npu.plugin.foreign import ForeignMemory
from graph_runner.base.builds import hash_of
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import parts_of
from graph_runner.bisect.whole import NPU, Whole, WholeOptions
from graph_runner.record.machine import machine
from graph_runner.record.recorder import Recorder, measured
from graph_runner.record.run import N_TOP, About, End, Run, Step
from graph_runner.run.session import Session
from graph_runner.trace import Selection

_OF_SESSION = ("device", "n_ctx", "weights", "without", "text")  # settings that are none of a user's


@dataclass(frozen=True)
class RecordOptions(WholeOptions):
    """What is recorded.

    is_watched  whether nodes are looked at; otherwise the ends alone
    data     nodes whose results are kept whole, as `Selection` has them; None: none
    logits   whether all logits of each step are kept, or its embeddings
    batch    tokens of the prompt that are decoded at once; 0: as many as llama.cpp takes
    tokens   decoded in place of the prompt, step by step; None: the prompt's, and the most likely ones after it
    notes    additions to the options of the device: a user's kernel files
    """

    is_watched: bool = True
    data: str | None = None
    logits: bool = False
    batch: int = 0
    tokens: Sequence[Sequence[Sequence[int]]] | None = None
    notes: Mapping[str, str] | None = None


def record(
    model: Path,
    prompt: str,
    options: RecordOptions,
    backend: AnyBackend,
    seen: Callable[[int], object] = lambda step: None,
) -> Run:
    """Runs a prompt and greedy tokens on a device. Returns what its nodes gave.

    seen  called after each step with its number

    Raises SessionError for a model or settings that llama.cpp refuses, and BadInputError if a node of `data` did not
    run.
    """
    whole = Whole(model, prompt, options, backend)
    selection = Selection(options.data) if options.data is not None else None
    run = Run(About({}, {}, {}, {}, prompt, options.is_watched))

    def selects(place: int, op: str, name: str) -> bool:
        assert selection is not None
        return selection.has(len(run.steps), place, op, name)

    def keep(place: int, data: NDArray[np.uint8]) -> None:
        run.data[len(run.steps), place] = data

    recorder = None
    if options.is_watched:
        memory = whole.npu or (ForeignMemory(whole.ggml) if whole.foreign is not None else None)
        recorder = Recorder(whole.ggml, memory, selects if selection is not None else None, keep)
    with whole.opened(whole.settings, recorder) as session:
        for tokens in _tokens(session, prompt, options):
            session.decode(*tokens)
            outputs = session.outputs()
            if options.logits:
                run.logits[len(run.steps)] = outputs
            n_top = N_TOP if session.gives == "logits" else 0
            ends = [_end(each, n_top) for each in outputs]
            run.steps.append(Step(tokens, ends, *(recorder.step() if recorder is not None else ())))
            seen(len(run.steps) - 1)
        run.state = f"{xxhash.xxh3_64_intdigest(session.save()):016x}"
        run.about = _about(model, prompt, whole, options, session)
    if recorder is not None:
        run.forms = recorder.forms
    if selection is not None and selection.without_node:
        raise BadInputError(f"--data {selection.without_node[0]!r}: no node of this run is that")
    return run


def _tokens(session: Session, prompt: str, options: RecordOptions) -> Iterator[list[list[int]]]:
    """Yields what each llama_decode is given, or llama_encode. Raises BadInputError if `batch` cannot be kept."""
    if options.tokens is not None:
        yield from ([[*each] for each in step] for step in options.tokens)
        return
    if options.batch and session.takes_all:
        raise BadInputError(f"--batch {options.batch}: this model takes all tokens of a prompt in one graph")
    for part in session.parts(*session.prompts(prompt)):
        most = options.batch or max(map(len, part))
        for begin in range(0, max(map(len, part)), most):
            yield [tokens[begin : begin + most] for tokens in part]
    for _ in range(session.n_steps(options.steps) - 1):
        yield session.next_tokens()


def _end(output: NDArray[np.float32], n_top: int) -> End:
    top = np.argsort(-output, kind="stable")[:n_top]
    return End(measured(output), tuple(top.tolist()), tuple(map(float, output[top])))


def _about(model: Path, prompt: str, whole: Whole, options: RecordOptions, session: Session) -> About:
    settings = {name: str(value) for name, value in vars(whole.settings).items() if name not in _OF_SESSION}
    settings["loras"] = " ".join(f"{path.name} {hash_of(path)}" for path in whole.settings.loras)
    settings |= {"device": whole.name, "batch": str(options.batch)}
    settings |= options.devices.described(options.device)
    if whole.npu is not None and options.device == NPU:
        settings |= whole.npu.backend.options.chosen()
    parts = [part for part in parts_of(model) if part.exists()]
    file = {
        "name": model.name, "description": session.description,
        "bytes": str(sum(each.stat().st_size for each in parts)), "xxh3": hash_of(*parts),
    }  # fmt: skip
    return About(
        session.identity, file, settings | dict(options.notes or {}), machine(whole.ggml), prompt, options.is_watched
    )
