"""Where llama.cpp places layers and nodes: which device stands beside its CPU, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ggml_backend_npu
from ggml_backend_npu import Backend, Options
from ggml_backend_npu.ggml.guard import Failures, interrupts_wait
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.contexts import Context
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.plugin import PROBED, Plugin
from ggml_backend_npu.plugin.registration import Registrable, alone
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import Settings

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


class Placement:
    """The device beside llama.cpp's CPU in one session, if its settings have one.

    npu       a plugin, if settings.device is "npu"; that of the default backend if omitted
    foreign   a device of another backend, or several, if settings.device is "foreign"
    context   the plugin's side of the session's context, once that is made
    failures  of the device's callbacks
    """

    def __init__(self, ggml: Ggml, settings: Settings, npu: Plugin | None, foreign: ForeignDevice | None) -> None:
        self._ggml, self._settings = ggml, settings
        self.npu = (npu or ggml_backend_npu.register()) if settings.device == "npu" else None
        self.foreign = foreign if settings.device == "foreign" else None
        self._lacking = self._without(settings.without) if settings.without and self.npu is None else None
        self.context: Context | None = None
        self.failures = self.npu.failures if self.npu is not None else Failures()

    def _without(self, ops: frozenset[str]) -> Plugin:
        """Returns a device that claims to compute ops while the context is made, and takes none."""
        return Plugin(self._ggml, Backend(f"without {' '.join(sorted(ops))}", ops=(), options=Options()))

    def takes(self, op: str) -> bool:
        """Whether the NPU has the op and its options let it take the op."""
        return self.npu is not None and op in self.npu.backend.op_names and self.npu.backend.offers(op)

    @property
    def of_layers(self) -> ForeignDevice | None:
        """The device of another backend, if llama.cpp is to give it layers."""
        return self.foreign if self.foreign is not None and self.foreign.takes_layers else None

    @property
    def n_layers(self) -> int:
        """How many layers llama.cpp is to give to a device."""
        return (self._settings.gpu_layers or 0) if self.npu is not None or self.of_layers is not None else 0

    @property
    def of_embeddings(self) -> int | None:
        """The buffer type for embeddings, if they do not stay on the CPU. llama.cpp leaves them there, but the output's
        weights may be the same tensor: with all layers offloaded, they are placed on the device, once."""
        if self.npu is None or not self._settings.gpu_layers or not self.takes("MUL_MAT"):
            return None
        return self.npu.buffer_type

    @property
    def is_queued(self) -> bool:
        """Whether what llama.cpp asks of the device may be done later."""
        return self.foreign is not None or (self.npu is not None and self.npu.buffer_type is not None)

    @property
    def flash_attention(self) -> int:
        """llama.cpp's flash attention type. With "auto" it is off if the op is not on the device of the layers, which
        an ACCEL device never is; so "auto" is "on" if the NPU takes the op."""
        chosen = self._settings.flash_attention
        return _FLASH_ATTENTION["on" if chosen == "auto" and self.takes("FLASH_ATTN_EXT") else chosen]

    def _beside(self, plugin: Plugin | None) -> Sequence[Registrable]:
        """The backends that llama.cpp may find beside its CPU: a plugin if there is one, or those of other people."""
        return [plugin] if plugin is not None else [] if self.foreign is None else self.foreign.each

    # calls of llama.cpp

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Delays interrupts while llama.cpp runs. A failure in a callback is not printed there but raised here."""
        with interrupts_wait(self.failures), self.failures.told_by_the_caller():
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within it, llama.cpp loads a model or a part of one, and finds this device and no other one of ours."""
        with alone(self._ggml, *self._beside(self.npu)), self.inside():
            yield

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Within it, llama.cpp makes a context, and finds this device and no other one of ours."""
        npu = self.npu
        with alone(self._ggml, *self._beside(self._lacking or npu)), self.inside():
            if npu is not None:
                npu.refusals.clear()
                npu.broken = None
            contexts = npu.contexts if npu is not None else {}
            others = set(contexts)
            with self._answering_probes():
                yield
            for address in contexts.keys() - others:
                self.context = contexts[address]

    @contextmanager
    def _answering_probes(self) -> Iterator[None]:
        """Claims optional ops while a context is made. llama.cpp asks which device computes them: if it is not the
        device of the layers, its graph has other ops in their place."""
        npu = self._lacking or self.npu
        if npu is None:
            yield
            return
        npu.claims = self._settings.without or (PROBED if self._settings.gpu_layers else frozenset())
        try:
            yield
        finally:
            npu.claims = None

    def refuse_what_is_broken(self) -> None:
        """Raises SessionError if the device no longer works."""
        if self.npu is not None and self.npu.broken is not None:
            raise SessionError(self.npu.broken)

    def refuse_what_is_lost(self) -> None:
        """Raises SessionError if the device failed in something that llama.cpp does not notice."""
        lost = self.npu.lost if self.npu is not None else None
        if self.npu is not None and lost is not None:
            self.npu.lost = None
            raise SessionError(lost)
