"""A model, a context and tokens: the only module that drives llama.cpp."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from llama_cpp import llama_cpp
from numba import types
from numpy.typing import NDArray

import ggml_backend_npu
from ggml_backend_npu import Backend, Options
from ggml_backend_npu.backend import NO_KERNEL
from ggml_backend_npu.ggml import convert, lib, structs
from ggml_backend_npu.ggml.crash import crashes_told
from ggml_backend_npu.ggml.guard import Failures, interrupts_wait, stopped_by_interrupts
from ggml_backend_npu.plugin.contexts import Context
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.plugin import PROBED, Plugin
from ggml_backend_npu.plugin.registration import alone
from graph_runner.base import endings
from graph_runner.base.console import printable
from graph_runner.base.errors import SessionError as SessionError
from graph_runner.base.limits import MOST_CELLS, MOST_THREADS, free_memory
from graph_runner.base.models import check_file
from graph_runner.base.settings import CACHE_TYPES, N_BATCH, QUANTISED_CACHE_TYPES
from graph_runner.base.settings import DeviceName as DeviceName
from graph_runner.base.settings import Settings as Settings
from graph_runner.base.settings import context_for as context_for
from graph_runner.run.batch import Batch, turned
from graph_runner.run.llama_log import Log
from graph_runner.run.sampling import Decoder as Decoder
from graph_runner.run.sampling import Sampler as Sampler
from graph_runner.run.sampling import generate as generate
from quant.kernels.jit import array_at, callback
from quant.kernels.processor import processors

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_FUNCTIONS_PER_OP = 64

LEFT_BY_THE_SCHEDULER = "supported, but the scheduler left it where its data lies"


class Observer(Protocol):
    """Sees every node of a run in order, by the address of its ggml_tensor."""

    def before(self, node: int) -> bool:
        """Called before the node runs: its sources are complete, its dst is not written yet. Returns whether to run it
        now and call `after`. Otherwise it runs together with the following nodes, up to one that returns True; these
        see sources that are not computed yet."""

    def after(self, node: int) -> None:
        """Called after the node has run."""


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override: the buffer type for tensors whose name matches a pattern."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


_FUSED = {f"fused DeepSeek V4 HC {part}": f"DSV4_HC_{part.upper()}" for part in ("pre", "comb", "post")}
_EMBEDDINGS = rb"^(token_embd|position_embd|token_types|per_layer_token_embd)\."


_log = Log()


@callback(types.boolean(types.intp, types.boolean, types.intp))
def _count_node(node: int, ask: bool, counts: int) -> bool:
    """cb_eval that observes no node but counts those that compute something: counts[op, function]."""
    if ask and array_at(node + structs.FLAGS_AT, types.int32, 1)[0] & structs.FLAG_COMPUTE:
        ne = array_at(node + 16, types.int64, 4)
        if ne[0] * ne[1] * ne[2] * ne[3] > 0:
            op = array_at(node + structs.OP_AT, types.int32, 2)
            function = op[1] if 0 <= op[1] < _FUNCTIONS_PER_OP else 0
            array_at(counts, types.int64, (op[0] + 1) * _FUNCTIONS_PER_OP)[op[0] * _FUNCTIONS_PER_OP + function] += 1
    return False


def _end(model: Path, what: str) -> None:
    """Ends a command in which llama.cpp crashed."""
    endings.end_process(2, printable(f"ggml-npu: model {str(model)!r}: llama.cpp crashed: {' '.join(what.split())}"))


class Session:
    """A loaded model with one sequence of tokens. A context manager, which frees both at its end.

    npu       the plugin that computes nodes if settings.device is "npu", registered with ggml or not; that of the
              default backend if omitted. The context has no other backend of this project
    foreign   a device of another backend, if settings.device is "foreign": llama.cpp gives it `settings.gpu_layers`
              if it takes layers, and computes what it does not take on the CPU
    observer  sees every node
    counts_nodes  whether to count nodes in `nodes`, if there is no observer
    progress  called with 0..1 while the model loads

    Afterwards `lacks` holds the fused ops that llama.cpp replaces by other ops, since they are not on the device of the
    layers. Raises SessionError for a model or settings that cannot be used.
    """

    def __init__(
        self,
        model: Path,
        settings: Settings,
        *,
        npu: Plugin | None = None,
        foreign: ForeignDevice | None = None,
        observer: Observer | None = None,
        counts_nodes: bool = True,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        check_file(model)
        self.ggml = lib.ggml()
        self.settings = settings
        self._observer, self._counts_nodes = observer, counts_nodes
        self._error: BaseException | None = None
        self._ends: list[int] = []
        self._counts = np.zeros((len(self.ggml.ops) + 1, _FUNCTIONS_PER_OP), np.int64)
        types_kv = [self._type_number(name) for name in ("cache_type_k", "cache_type_v")]
        self._check_settings()
        self.npu = (npu or ggml_backend_npu.register()) if settings.device == "npu" else None
        self._foreign = foreign if settings.device == "foreign" else None
        self._lacking = self._without(settings.without) if settings.without and self.npu is None else None
        self._failures = self.npu.failures if self.npu is not None else Failures()
        self.npu_context: Context | None = None
        llama_cpp.llama_backend_init()
        self._told = ExitStack()
        if endings.process_is_ours():
            self._told.enter_context(crashes_told(self.ggml, lambda what: _end(model, what)))
        try:
            self._load(model, progress)
        except BaseException:
            self._told.close()
            raise
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        try:
            self._refuse_encoder(model)
            self._refuse_caches_without_memory()
            self._open(model, types_kv)
            self._adapt()
        except BaseException:
            llama_cpp.llama_model_free(self._model)
            self._told.close()
            raise

    @property
    def _chosen(self) -> Plugin | ForeignDevice | None:
        """The device that computes beside llama.cpp's CPU."""
        return self.npu or self._foreign

    def _check_settings(self) -> None:
        settings = self.settings
        if not 0 <= settings.threads <= MOST_THREADS:
            raise SessionError(f"threads {settings.threads}: must be 0 to {MOST_THREADS}, 4 for each processor")
        if not 0 < settings.n_ctx <= MOST_CELLS:
            raise SessionError(f"context of {settings.n_ctx} cells: must be 1 to {MOST_CELLS}")
        if settings.cache_type_v in QUANTISED_CACHE_TYPES and settings.flash_attention == "off":
            raise SessionError(
                f"cache type {settings.cache_type_v} of V: a quantised V cache needs flash attention, which is off"
            )

    def _type_number(self, setting: str) -> int:
        name = getattr(self.settings, setting)
        if name not in CACHE_TYPES:
            raise SessionError(f"{setting} {name!r}: must be one of {' '.join(CACHE_TYPES)}")
        return self.ggml.type_numbers[name]

    def _load(self, model: Path, progress: Callable[[float], None] | None) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = self.settings.repack  # repacked weights are invisible to any backend but the CPU's own
        params.no_alloc = not self.settings.weights
        if params.no_alloc and hasattr(params, "load_mode"):
            params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        elif params.no_alloc:
            params.use_mmap = False
        foreign = self._foreign if self._foreign is not None and self._foreign.takes_layers else None
        params.n_gpu_layers = (self.settings.gpu_layers or 0) if self.npu is not None or foreign is not None else 0
        if foreign is not None:
            self._devices = (ctypes.c_void_p * 2)(foreign.handle, None)
            params.devices = ctypes.addressof(self._devices)
        places = self._places_of_weights()
        params.tensor_buft_overrides = ctypes.addressof(places)
        if progress is not None:
            self._progress = llama_cpp.llama_progress_callback(lambda done, _: (progress(done), True)[1])
            params.progress_callback = self._progress
        _log.clear()
        with alone(self.ggml, self._chosen), self._inside():
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            why = self._failures.message if self.npu is not None and self.npu.memory is not None else None
            raise SessionError(f"model {str(model)!r}: {why or _log.reason()}")
        try:
            self._refuse_what_is_lost()
        except SessionError:
            llama_cpp.llama_model_free(self._model)
            raise

    def _places_of_weights(self) -> ctypes.Array[_Override]:
        """Returns where weights go. llama.cpp leaves embeddings to the CPU, but the output's weights may be the same
        tensor: with all layers offloaded, they are placed on the device, once."""
        device = self.npu.buffer_type if self.npu is not None and self._takes("MUL_MAT") else None
        own = [_Override(_EMBEDDINGS, device)] if device is not None and self.settings.gpu_layers else []
        return (_Override * (len(own) + 1))(*own, _Override())

    def _takes(self, op: str) -> bool:
        """Whether the NPU has the op and its options let it take the op."""
        return self.npu is not None and op in self.npu.backend.op_names and self.npu.backend.offers(op)

    def _flash_attention(self) -> int:
        """Returns llama.cpp's flash attention type. With "auto" it is off if the op is not on the device of the layers,
        which an ACCEL device never is; so "auto" is "on" if the NPU takes the op."""
        chosen = self.settings.flash_attention
        return _FLASH_ATTENTION["on" if chosen == "auto" and self._takes("FLASH_ATTN_EXT") else chosen]

    def _refuse_encoder(self, model: Path) -> None:
        if llama_cpp.llama_model_has_encoder(self._model) or not llama_cpp.llama_model_has_decoder(self._model):
            raise SessionError(f"model {str(model)!r}: has an encoder; models that only decode are run here")

    def _refuse_caches_without_memory(self) -> None:
        """Raises SessionError for caches that are larger than the memory that is free: llama.cpp fills them with zeros,
        and the system would end the process, or another one."""
        settings, of_model = self.settings, self._model
        heads = llama_cpp.llama_model_n_head(of_model), llama_cpp.llama_model_n_head_kv(of_model)
        row = llama_cpp.llama_model_n_embd(of_model) // max(1, heads[0]) * heads[1]
        types = (self.ggml.types[self._type_number(name)] for name in ("cache_type_k", "cache_type_v"))
        cell = sum(-(-row // each.block_size) * each.block_bytes for each in types)
        n_cells = settings.n_ctx * settings.sequences
        needed, free = n_cells * llama_cpp.llama_model_n_layer(of_model) * cell, free_memory()
        on_host = self.npu is None or self.npu.buffer_type is None
        if on_host and settings.weights and free is not None and needed > free:
            sizes = f"its caches take some {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            raise SessionError(f"context of {n_cells} cells: {sizes}")

    def _open(self, model: Path, types_kv: list[int]) -> None:
        settings = self.settings
        threads = settings.threads or processors()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.n_ctx * settings.sequences
        params.n_seq_max = settings.sequences
        params.n_batch = params.n_ubatch = min(params.n_ctx, N_BATCH)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = self._flash_attention()
        params.type_k, params.type_v = types_kv
        params.op_offload = settings.op_offload
        if self._observer is not None:
            self._callback = structs.EvalCallback(self._observe)
            params.cb_eval = ctypes.cast(self._callback, type(params.cb_eval))
        elif self._counts_nodes:
            params.cb_eval = ctypes.cast(_count_node.address, type(params.cb_eval))
            params.cb_eval_user_data = self._counts.ctypes.data
        _log.clear()
        with alone(self.ggml, self._lacking or self._chosen), self._inside():
            if self.npu is not None:
                self.npu.refusals.clear()
                self.npu.broken = None
            contexts = self.npu.contexts if self.npu is not None else {}
            others = set(contexts)
            with self._answering_probes():
                self._context = llama_cpp.llama_init_from_model(self._model, params)
            for address in contexts.keys() - others:
                self.npu_context = contexts[address]
        if self._context and self.npu is not None and self.npu.broken is not None:
            llama_cpp.llama_free(self._context)
            raise SessionError(self.npu.broken)
        if not self._context:
            asked = f"context of {settings.n_ctx} cells, caches {settings.cache_type_k}/{settings.cache_type_v}"
            raise SessionError(f"{asked}, for model {str(model)!r}: {_log.reason()}")
        self.n_batch = int(params.n_batch)
        self._graph_line = _log.find("splits =")
        self.lacks = frozenset(op for name, op in _FUSED.items() if _log.find(f"{name} not supported, set to disabled"))

    def _adapt(self) -> None:
        """Adds the LoRA adapters to the context; the model frees them."""
        adapters = []
        for file in self.settings.loras:
            check_file(file, "adapter")
            _log.clear()
            with alone(self.ggml, self._chosen), self._inside():
                adapters.append(llama_cpp.llama_adapter_lora_init(self._model, os.fsencode(file)))
            if not adapters[-1]:
                llama_cpp.llama_free(self._context)
                raise SessionError(f"adapter {str(file)!r}: {_log.reason()}")
        if adapters:
            pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
            scales = (ctypes.c_float * len(adapters))(*(1.0 for _ in adapters))
            llama_cpp.llama_set_adapters_lora(self._context, pointers, len(adapters), scales)

    def _without(self, ops: frozenset[str]) -> Plugin:
        """Returns a device that claims to compute ops while the context is made, and takes none."""
        return Plugin(self.ggml, Backend(f"without {' '.join(sorted(ops))}", ops=(), options=Options()))

    @contextmanager
    def _answering_probes(self) -> Iterator[None]:
        """Claims optional ops while a context is made. llama.cpp asks which device computes them: if it is not the
        device of the layers, its graph has other ops in their place."""
        npu = self._lacking or self.npu
        if npu is None:
            yield
            return
        npu.claims = self.settings.without or (PROBED if self.settings.gpu_layers else frozenset())
        try:
            yield
        finally:
            npu.claims = None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Delays interrupts while llama.cpp runs. A failure in a callback is not printed there but raised here."""
        with interrupts_wait(self._failures), self._failures.told_by_the_caller():
            yield

    @stopped_by_interrupts
    def _observe(self, node: int, ask: bool, _: Any) -> bool:
        assert self._observer is not None
        try:
            if ask:
                return self._observer.before(node)
            self._observer.after(node)
        except BaseException as error:
            self._error = error
            return False
        return True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        llama_cpp.llama_synchronize(self._context)  # a queue may still hold copies into its memory
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
        self._told.close()

    @property
    def description(self) -> str:
        """llama.cpp's description of the model: architecture, size, type."""
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model, text, len(text))
        return text.value.decode(errors="replace")

    @property
    def splits(self) -> str | None:
        """The number of graph splits as llama.cpp logs it: for the prompt and, if it differs, for one token; None if
        not logged."""
        if self._graph_line is None:
            return None
        return self._graph_line.split("splits = ", 1)[1].split(", input", 1)[0]

    @property
    def token_splits(self) -> int:
        """The number of splits of the graph of one token; 0 if llama.cpp did not log it."""
        return int((self.splits or "0").split(" / ")[-1])

    @property
    def nodes(self) -> Counter[str]:
        """How many nodes of each op computed something since the session began, on any device."""
        found: Counter[str] = Counter()
        for op, function in zip(*np.nonzero(self._counts), strict=True):
            name = self.ggml.op_name(int(op), int(function))
            if convert.computes(name):
                found[name] += int(self._counts[op, function])
        return found

    @property
    def npu_nodes(self) -> Counter[str]:
        """How many of `nodes` the NPU computed."""
        return Counter(self.npu_context.statistics.computed if self.npu_context else ())

    @property
    def left_to_the_cpu(self) -> dict[str, tuple[int, str]]:
        """Those of `nodes` that the NPU did not compute: their number and the reason, by op."""
        left = self.nodes - self.npu_nodes
        return {op: (count, self.why_left(op)) for op, count in left.most_common()}

    def why_left(self, op: str) -> str:
        """Returns why the NPU did not compute nodes of an op."""
        if self.npu is None:
            return LEFT_BY_THE_SCHEDULER
        usual = LEFT_BY_THE_SCHEDULER if op in self.npu.backend.op_names else NO_KERNEL
        return self.npu.refusals.get(op, usual)

    @property
    def trained_for(self) -> int:
        """The context length in training, in tokens."""
        return int(llama_cpp.llama_model_n_ctx_train(self._model))

    @property
    def window(self) -> int:
        """How many tokens a token sees in layers with a sliding window; 0 if there are none."""
        return int(llama_cpp.llama_model_n_swa(self._model))

    @property
    def npu_spans(self) -> Counter[str]:
        """How many spans of nodes the NPU computed as one operator, by its name."""
        return Counter(self.npu_context.statistics.fused if self.npu_context else ())

    def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that the model wants at the beginning. Raises SessionError if the
        model has no tokenizer or the text gives no tokens."""
        if llama_cpp.llama_vocab_type(self._vocabulary) == 0:
            raise SessionError("the model has no tokenizer")
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), tokens, len(tokens), True, True)
        if count < 1:
            raise SessionError(f"prompt {text!r}: has no tokens")
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        """Returns the bytes that a token adds to the text."""
        text = ctypes.create_string_buffer(256)
        count = llama_cpp.llama_token_to_piece(self._vocabulary, token, text, len(text), 0, False)
        return text.raw[: max(0, count)]

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocabulary, token))

    def prompts(self, text: str) -> list[list[int]]:
        """Returns the tokens of a text for each sequence: those of `tokenize`, and for others the same ones turned, so
        that each is another text. The first token stays if the model wants one at the beginning. Raises SessionError
        as `tokenize` does."""
        n_fixed = int(bool(llama_cpp.llama_vocab_get_add_bos(self._vocabulary)))
        return turned(self.tokenize(text), n_fixed, self.settings.sequences)

    def decode(self, *sequences: list[int]) -> None:
        """Runs tokens of each sequence through the model, after the previous ones, as many of each, all sequences
        together. Raises SessionError if the context is full, or if llama.cpp or a node fails."""
        n, n_at_once = len(sequences[0]), max(1, self.n_batch // len(sequences))
        for begin in range(0, n, n_at_once):
            batch = Batch([tokens[begin : begin + n_at_once] for tokens in sequences])
            self._ends = batch.ends
            _log.clear()
            with self._inside():
                status = llama_cpp.llama_decode(self._context, batch.batch)
                if self._foreign is not None or (self.npu is not None and self.npu.buffer_type is not None):
                    llama_cpp.llama_synchronize(self._context)  # what is queued may fail, and no status tells it
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._graph_line = _log.find("splits =") or self._graph_line  # adapters make it another graph
            if status == 1:
                raise SessionError(f"context of {self.settings.n_ctx} cells is full")
            if self.npu is not None and self.npu.broken is not None:
                raise SessionError(self.npu.broken)
            self._refuse_what_is_lost()
            if status != 0:
                said = self._failures.message or f"llama.cpp failed to decode: {_log.reason()}"
                raise SessionError(said) from self._failures.error

    def _refuse_what_is_lost(self) -> None:
        """Raises SessionError if the device failed in something that llama.cpp does not notice."""
        lost = self.npu.lost if self.npu is not None else None
        if self.npu is not None and lost is not None:
            self.npu.lost = None
            raise SessionError(lost)

    def save(self) -> bytes:
        """Returns the state of the context: keys and values of the tokens, recurrent states."""
        data = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(self._context))()
        return bytes(data[: llama_cpp.llama_state_get_data(self._context, data, len(data))])

    def restore(self, state: bytes) -> None:
        """Restores a state from `save`. Raises SessionError if it does not fit this context."""
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        with self._inside():
            if llama_cpp.llama_state_set_data(self._context, data, len(data)) != len(state):
                raise SessionError(f"state of {len(state)} bytes does not fit this context")

    def clear(self) -> None:
        """Drops all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def forget(self, begin: int, end: int) -> None:
        """Context shift: drops the tokens at positions [begin, end) and moves up those after them. Raises SessionError
        if the model's context does not allow it."""
        memory = llama_cpp.llama_get_memory(self._context)
        if not llama_cpp.llama_memory_can_shift(memory):
            raise SessionError("the context of this model cannot be shifted")
        if not llama_cpp.llama_memory_seq_rm(memory, 0, begin, end):
            raise SessionError(f"tokens {begin} to {end} cannot be dropped alone")
        llama_cpp.llama_memory_seq_add(memory, 0, end, -1, begin - end)

    def logits(self) -> NDArray[np.float32]:
        """Returns a copy of the logits of the last token, (n_vocab,). Raises SessionError if no token was decoded, or
        the device failed to deliver them."""
        return self._logits_at(-1)

    def logits_of_each(self) -> NDArray[np.float32]:
        """Returns a copy of the logits of each sequence's last token, (sequences, n_vocab). Raises SessionError as
        `logits` does."""
        return np.stack([self._logits_at(end) for end in self._ends])

    def _logits_at(self, place: int) -> NDArray[np.float32]:
        """Returns the logits of a token of the last batch."""
        n_vocabulary = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        pointer = llama_cpp.llama_get_logits_ith(self._context, place)
        self._refuse_what_is_lost()
        if not pointer:
            raise SessionError("logits: no token has been decoded")
        return np.ctypeslib.as_array(pointer, (n_vocabulary,)).copy()
