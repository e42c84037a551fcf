"""Whole runs of a model that nobody observes, beside one of ggml's CPU alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggml_backend_npu import AnyBackend
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.limited import limited
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import ALL_LAYERS, DeviceName, Gives, Settings
from graph_runner.bisect.result import Unit
from graph_runner.diff.logits import Ending, Endings, Outputs
from graph_runner.diff.walks import Place, Walk
from graph_runner.judging.results import types_of
from graph_runner.run.devices import Devices
from graph_runner.run.session import Observer, Session
from quant.kernels.processor import processors

CPU, NPU = "CPU", "NPU"
_NOTHING = 1e-9  # an NMSE that is small whatever flash attention alone changes
Batches = Sequence[list[list[int]]]  # tokens of each sequence, step by step


def _nothing(name: str) -> None:
    pass


@dataclass(frozen=True)
class WholeOptions:
    """What runs where.

    device   "NPU", "CPU", or one of `devices`
    steps    tokens to decode after the prompt
    settings of the context; device and n_ctx are set here
    """

    device: str = NPU
    devices: Devices = field(default_factory=Devices)
    steps: int = 4
    settings: Settings = field(default_factory=Settings)


class _Names(Walk):
    """An observer that lists the nodes of a run by name and by place, and lets whole splits run."""

    def __init__(self, ggml: Ggml) -> None:
        super().__init__(ggml)
        self.found: dict[str, Unit] = {}
        self.at: dict[Place, str] = {}

    def looks_at(self, place: Place, address: int) -> bool:
        if convert.is_to_be_computed(self.ggml, address):
            node = convert.node(self.ggml, address)
            self.found.setdefault(node.name, Unit(node.name, node.op, types_of(node), node.dst.ne))
            self.at[place] = node.name
        return False


class Whole:
    """A model that is run whole on a device.

    name   of the device
    units  the nodes that may run on it, in their order, once `prepare` has run
    at     the names of all nodes of the prompt and of the first token, by place as a diff counts them
    gives  what each step gives
    """

    def __init__(self, model: Path, prompt: str, options: WholeOptions, backend: AnyBackend) -> None:
        self._model, self._prompt, self.options = model, prompt, options
        self.ggml = lib.ggml()
        ours = backend.like(options=backend.options.to_compare)
        self.npu = Plugin(self.ggml, ours) if options.device == NPU else None
        self.foreign: ForeignDevice | None = None
        if options.device not in (CPU, NPU):
            self.foreign = options.devices.named(self.ggml, options.device)
        settings = options.settings
        layers = ALL_LAYERS if settings.gpu_layers is None else settings.gpu_layers
        takes_layers = ours.options.device_type == "gpu" if self.foreign is None else self.foreign.takes_layers
        kind: DeviceName = "foreign" if self.foreign is not None else "npu" if self.npu is not None else "cpu"
        self.settings = replace(
            settings.holding(prompt, options.steps), device=kind,
            threads=settings.threads or processors(), gpu_layers=layers if takes_layers else 0,
        )  # fmt: skip
        self.name = options.device if self.foreign is None else self.foreign.name
        self.n_prompt = 0
        self.units: Sequence[Unit] = ()
        self.at: dict[Place, str] = {}
        self._on_cpu = replace(self.settings, device="cpu", gpu_layers=0)
        self._batches: Batches = ()
        self._reference: list[Outputs] = []
        self.gives: list[Gives] = []

    def prepare(self) -> None:
        """Lists the nodes of the device's run, and runs the reference."""
        names = _Names(self.ggml)
        with self.opened(self.settings, names) as session, self._with(()):
            tokens = session.prompts(self._prompt)
            self.n_prompt = len(tokens[0])
            session.decode(*tokens)
            for _ in range(session.n_steps(min(self.options.steps, 1)) - 1):
                names.next_step()
                session.decode(*session.next_tokens())
            self._on_cpu = replace(self._on_cpu, without=session.lacks)
        self.units, self.at = [*names.found.values()], names.at
        self._batches, self._reference, self.gives = self.greedy(self._on_cpu)

    def greedy(self, settings: Settings) -> tuple[Batches, list[Outputs], list[Gives]]:
        """Returns the prompt's tokens and the most likely ones after it, step by step, and what each step gives."""
        batches, found, gives = [], [], []
        with self.opened(settings) as session:
            batches.append(session.prompts(self._prompt))
            for left in reversed(range(session.n_steps(self.options.steps))):
                session.decode(*batches[-1])
                found.append(session.outputs())
                gives.append(session.gives)
                if left:
                    batches.append(session.next_tokens())
        return batches, found, gives

    def natural(self) -> float:
        """Returns a limit: the NMSE of what the reference gives, with flash attention on and off."""
        on_cpu = self._on_cpu
        switched = replace(on_cpu, flash_attention="off" if on_cpu.flash_attention == "on" else "on")
        try:
            return max(self._apart(self._outputs(switched)).nmse, _NOTHING)
        except SessionError:
            return _NOTHING  # a model without flash attention

    def run(self, names: Collection[str], asked: Callable[[str], object] = _nothing) -> Ending:
        """Runs the tokens with nodes of some names on the device. Returns how far the end is from the reference's.

        asked  called with the name of each node that may be on the CPU as well
        """
        return self._apart(self._outputs(self.settings, names, asked))

    def _outputs(
        self, settings: Settings, names: Collection[str] | None = None, asked: Callable[[str], object] = _nothing
    ) -> list[Outputs]:
        """Returns what each step gives. Which nodes are on the device is decided after the context was made,
        which decides of what ops the graph is.

        names  of nodes that are on the device; None: all that it takes
        """
        found = []
        with self.opened(settings) as session, nullcontext() if names is None else self._with(names, asked):
            for tokens in self._batches:
                session.decode(*tokens)
                found.append(session.outputs())
        return found

    @contextmanager
    def _with(self, names: Collection[str], asked: Callable[[str], object] = _nothing) -> Iterator[None]:
        def takes(name: str) -> bool:
            asked(name)
            return name in names

        foreign = () if self.foreign is None else self.foreign.each
        with ExitStack() as limits:
            for device in foreign if self.npu is None else (self.npu,):
                limits.enter_context(limited(self.ggml, device.handle, takes))
            yield

    def _apart(self, outputs: list[Outputs]) -> Ending:
        endings = Endings()
        for reference, other, of in zip(self._reference, outputs, self.gives, strict=True):
            endings.add(reference, other, of)
        return endings.ending()

    def opened(self, settings: Settings, observer: Observer | None = None) -> Session:
        """Opens a session."""
        return Session(self._model, settings, npu=self.npu, foreign=self.foreign, observer=observer, counts_nodes=False)
