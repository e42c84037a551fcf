"""A session: a model, a context and tokens that llama.cpp decodes in it."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend import NO_KERNEL
from ggml_backend_npu.ggml import lib, llama
from ggml_backend_npu.ggml.crash import crashes_told
from ggml_backend_npu.plugin.contexts import Context
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base import endings
from graph_runner.base.console import printable
from graph_runner.base.errors import SessionError as SessionError
from graph_runner.base.limits import MOST_CELLS, MOST_THREADS
from graph_runner.base.models import check_file
from graph_runner.base.settings import CACHE_TYPES, N_BATCH, QUANTISED_CACHE_TYPES, Gives
from graph_runner.base.settings import DeviceName as DeviceName
from graph_runner.base.settings import Settings as Settings
from graph_runner.base.settings import context_for as context_for
from graph_runner.run import llama_log
from graph_runner.run.batch import Batch, together, turned
from graph_runner.run.model import Model
from graph_runner.run.observing import Counts, Observed
from graph_runner.run.observing import Observer as Observer
from graph_runner.run.placement import Placement
from graph_runner.run.sampling import Decoder as Decoder
from graph_runner.run.sampling import Sampler as Sampler
from graph_runner.run.sampling import generate as generate
from graph_runner.run.sampling import most_likely
from quant.kernels.processor import processors

llama_cpp = llama.functions()
LEFT_BY_THE_SCHEDULER = "supported, but the scheduler left it where its data lies"
_FUSED = {f"fused DeepSeek V4 HC {part}": f"DSV4_HC_{part.upper()}" for part in ("pre", "comb", "post")}


def _end(model: Path, what: str) -> None:
    """Ends a command in which llama.cpp crashed."""
    endings.end_process(2, printable(f"ggml-npu: model {str(model)!r}: llama.cpp crashed: {' '.join(what.split())}"))


class Session:
    """A loaded model with sequences of tokens. A context manager, which frees both at its end.

    The model says what a step does. A model with an encoder encodes the prompt, and decodes from its start token on. A
    model that makes embeddings, pooled or one of each token, gives these in place of logits, and has no next token.

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
        self._observed = Observed(observer) if observer is not None else None
        self._counts = Counts(self.ggml)
        self._batch = Batch([])
        self._gives: Gives = "logits"
        types_kv = [self._type_number(name) for name in ("cache_type_k", "cache_type_v")]
        self._check_settings()
        self._placement = Placement(self.ggml, settings, npu, foreign)
        self.npu = self._placement.npu
        llama_cpp.llama_backend_init()
        with ExitStack() as stack:
            if endings.process_is_ours():
                stack.enter_context(crashes_told(self.ggml, lambda what: _end(model, what)))
            self._model = Model(model, settings, self._placement, progress)
            stack.callback(self._model.free)
            self._model.refuse_drafts()
            self._model.refuse_caches_without_memory(self.ggml)
            self._open(model, types_kv, counts_nodes=counts_nodes)
            stack.callback(self._free)
            self._model.adapt(self._context)
            self._learn_what_it_gives()
            self._opened = stack.pop_all()
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.handle)

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

    def _open(self, model: Path, types_kv: list[int], *, counts_nodes: bool) -> None:
        settings = self.settings
        threads = settings.threads or processors()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.n_ctx * settings.sequences
        params.n_seq_max = settings.sequences
        takes_all = self._model.takes_all
        params.n_batch = params.n_ubatch = params.n_ctx if takes_all else min(params.n_ctx, N_BATCH)
        params.embeddings = self._model.is_pooled
        params.kv_unified = takes_all  # else llama.cpp pools parts of sequences, and T5 has one sequence alone
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = self._placement.flash_attention
        params.type_k, params.type_v = types_kv
        params.op_offload = settings.op_offload
        if self._observed is not None:
            params.cb_eval = ctypes.cast(self._observed.callback, type(params.cb_eval))
            if (sieve := self._observed.sieve) is not None:
                params.cb_eval_user_data = sieve.over(ctypes.cast(self._observed.callback, ctypes.c_void_p).value or 0)
                params.cb_eval = ctypes.cast(sieve.callback, type(params.cb_eval))
        elif counts_nodes:
            params.cb_eval = ctypes.cast(self._counts.callback, type(params.cb_eval))
            params.cb_eval_user_data = self._counts.address
        llama_log.forget()
        with self._placement.opening():
            self._context = llama_cpp.llama_init_from_model(self._model.handle, params)
        if not self._context:
            asked = f"context of {settings.n_ctx} cells, caches {settings.cache_type_k}/{settings.cache_type_v}"
            raise SessionError(f"{asked}, for model {str(model)!r}: {llama_log.reason()}")
        try:
            self._placement.refuse_what_is_broken()
        except SessionError:
            llama_cpp.llama_free(self._context)
            raise
        self.n_batch = int(params.n_batch)
        self._graph_line = llama_log.find("splits =")
        self.lacks = frozenset(
            op for name, op in _FUSED.items() if llama_log.find(f"{name} not supported, set to disabled")
        )

    def _learn_what_it_gives(self) -> None:
        model, has_memory = self._model, bool(llama_cpp.llama_get_memory(self._context))
        is_diffusion = bool(llama_cpp.llama_model_is_diffusion(model.handle))
        self._only_encodes = not model.has_decoder or not (has_memory or is_diffusion)
        self._sees_all = not has_memory or (model.takes_all and not model.has_encoder)
        self._only_embeds = self._only_encodes or model.is_pooled
        self._has_encoded = False
        if self._only_embeds:
            llama_cpp.llama_set_embeddings(self._context, True)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _free(self) -> None:
        llama_cpp.llama_synchronize(self._context)  # a queue may still hold copies into its memory
        llama_cpp.llama_free(self._context)

    @property
    def description(self) -> str:
        """llama.cpp's description of the model: architecture, size, type."""
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model.handle, text, len(text))
        return text.value.decode(errors="replace")

    @property
    def identity(self) -> dict[str, str]:
        """What all quantisations of the model have in common."""
        model = self._model.handle
        return {
            "architecture": self._model.said("general.architecture"),
            "layers": str(llama_cpp.llama_model_n_layer(model)),
            "width": str(llama_cpp.llama_model_n_embd(model)),
            "vocabulary": str(llama_cpp.llama_vocab_n_tokens(self._vocabulary)),
            "parameters": str(llama_cpp.llama_model_n_params(model)),
        }

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
        return self._counts.by_op()

    @property
    def npu_context(self) -> Context | None:
        """The plugin's side of the context."""
        return self._placement.context

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
        return int(llama_cpp.llama_model_n_ctx_train(self._model.handle))

    @property
    def window(self) -> int:
        """How many tokens a token sees in layers with a sliding window; 0 if there are none."""
        return int(llama_cpp.llama_model_n_swa(self._model.handle))

    @property
    def npu_spans(self) -> Counter[str]:
        """How many spans of nodes the NPU computed as one operator, by its name."""
        return Counter(self.npu_context.statistics.fused if self.npu_context else ())

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text, with those that the model wants at the beginning. Raises SessionError if the
        model has no tokenizer or the text gives no tokens.

        special  whether a text like "<s>" is the special token of that name
        """
        if llama_cpp.llama_vocab_type(self._vocabulary) == 0:
            raise SessionError("the model has no tokenizer")
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), tokens, len(tokens), True, special)
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

    @property
    def begins_with(self) -> list[int]:
        """The token that the model wants at the beginning, if it wants one."""
        wanted = llama_cpp.llama_vocab_get_add_bos(self._vocabulary)
        return [llama_cpp.llama_vocab_bos(self._vocabulary)] if wanted else []

    def prompts(self, text: str) -> list[list[int]]:
        """Returns the tokens of a text for each sequence: those of `tokenize`, and for others fewer of them, turned, so
        that each is another text of another length. The first token stays if the model wants one at the beginning.
        Raises SessionError as `tokenize` does."""
        return turned(self.tokenize(text), len(self.begins_with), self.settings.sequences)

    @property
    def encodes(self) -> bool:
        """Whether the next step is one of the encoder: the prompt of a model that has one, or all of one that has no
        decoder."""
        return self._model.has_encoder and not (self._has_encoded and self._model.has_decoder)

    def n_steps(self, n: int) -> int:
        """Returns how many steps a prompt and n tokens after it take: one more with an encoder, whose prompt is not
        decoded, and the prompt's alone if there is no next token."""
        return 1 if self._only_embeds else n + 1 + self._model.has_encoder

    @property
    def takes_all(self) -> bool:
        """Whether the tokens of the next step must be in one graph."""
        return self.encodes or self._sees_all

    def parts(self, *sequences: list[int]) -> Iterator[list[list[int]]]:
        """Yields what is run at once, a graph each: see `together`; all tokens if the next step `takes_all`."""
        if self.takes_all:
            yield [*sequences]
        else:
            yield from together(sequences, self.n_batch)

    def decode(self, *sequences: list[int]) -> None:
        """Runs tokens of each sequence through the model, after the previous ones, so that all end `together`. Encodes
        them if the model `encodes`. Raises SessionError if the context is full, or if llama.cpp or a node fails."""
        for part in self.parts(*sequences):
            n, longest = sum(map(len, part)), max(map(len, part))
            if n > self.n_batch:
                raise SessionError(f"{n:,} tokens: a graph of this context has at most {self.n_batch:,}")
            if self._sees_all and longest > self.trained_for:
                raise SessionError(f"{longest:,} tokens: the model takes at most {self.trained_for:,} at once")
            self._decode(Batch(part))

    def logits_of_last(self, tokens: list[int], n: int) -> NDArray[np.float32]:
        """Runs tokens through the model, as `decode` does, and returns the logits of the last n of them, (n, n_vocab).
        Raises SessionError as `decode` and `logits` do, and for a model that encodes."""
        if self._model.has_encoder or self._only_encodes:
            raise SessionError("the model encodes; those that only decode have logits of each token of a text")
        found = []
        for begin in range(0, len(tokens), self.n_batch):
            part = tokens[begin : begin + self.n_batch]
            first = max(0, len(tokens) - n - begin)  # place in the part of the first of them
            self._decode(Batch([part], len(part) - first))
            found += [self._logits_at(place) for place in range(first, len(part))]
        return np.stack(found)

    def _decode(self, batch: Batch) -> None:
        self._batch, encodes = batch, self.encodes
        self._gives = "embeddings" if self._only_embeds or encodes else "logits"
        llama_log.forget()
        with self._placement.inside():
            run = llama_cpp.llama_encode if encodes else llama_cpp.llama_decode
            status = run(self._context, batch.batch)
            if self._placement.is_queued:
                llama_cpp.llama_synchronize(self._context)  # what is queued may fail, and no status tells it
        if self._observed is not None:
            self._observed.refuse_what_was_raised()
        self._graph_line = llama_log.find("splits =") or self._graph_line  # adapters make it another graph
        if status == 1:
            raise SessionError(f"context of {self.settings.n_ctx} cells is full")
        self._placement.refuse_what_is_broken()
        self._placement.refuse_what_is_lost()
        if status != 0:
            failures = self._placement.failures
            what = "encode" if encodes else "decode"
            said = failures.message or f"llama.cpp failed to {what}: {llama_log.reason()}"
            raise SessionError(said) from failures.error
        self._has_encoded |= encodes

    def save(self) -> bytes:
        """Returns the state of the context: keys and values of the tokens, recurrent states."""
        data = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(self._context))()
        return bytes(data[: llama_cpp.llama_state_get_data(self._context, data, len(data))])

    def restore(self, state: bytes) -> None:
        """Restores a state from `save`. Raises SessionError if it does not fit this context."""
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        with self._placement.inside():
            if llama_cpp.llama_state_set_data(self._context, data, len(data)) != len(state):
                raise SessionError(f"state of {len(state)} bytes does not fit this context")

    def clear(self) -> None:
        """Drops all tokens."""
        self._has_encoded = False
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
        return np.stack([self._logits_at(end) for end in self._batch.ends])

    @property
    def gives(self) -> Gives:
        """What the last step gave: `outputs` are that."""
        return self._gives

    def outputs(self) -> NDArray[np.float32]:
        """Returns a copy of what the last step gave: the logits of each sequence's last token, (sequences, n_vocab), or
        embeddings, of each sequence if the model pools them, else of each token: (sequences or tokens, n_embd).
        Raises SessionError as `logits` does."""
        if self.gives == "logits":
            return self.logits_of_each()
        model, pooling = self._model.handle, llama_cpp.llama_pooling_type(self._context)
        is_score = pooling == llama_cpp.LLAMA_POOLING_TYPE_RANK
        n = (llama_cpp.llama_model_n_cls_out if is_score else llama_cpp.llama_model_n_embd_out)(model)
        is_pooled = pooling != llama_cpp.LLAMA_POOLING_TYPE_NONE
        get = llama_cpp.llama_get_embeddings_seq if is_pooled else llama_cpp.llama_get_embeddings_ith
        of = range(len(self._batch.ends) if is_pooled else self._batch.n)
        return np.stack([self._array(get(self._context, each), n) for each in of])

    def next_tokens(self) -> list[list[int]]:
        """Returns what the next step decodes: the most likely token of each sequence, and as a draft of more the ones
        that come next in likelihood; or after an encoder the one that the decoder begins with. Raises SessionError as
        `logits` does, and if there is no next token."""
        if self.gives == "logits":
            return [most_likely(logits, 1 + self.settings.draft) for logits in self.logits_of_each()]
        if self._only_embeds:
            raise SessionError("the model makes embeddings, and has no next token")
        return [[self._model.decoder_begins_with] for _ in self._batch.ends]

    def begin(self, tokens: list[int]) -> list[int]:
        """Encodes a prompt, if the model has an encoder and a decoder. Returns the tokens to decode first. Raises
        SessionError as `decode` does."""
        if not self.encodes or self._only_embeds:
            return tokens
        self.decode(tokens)
        return self.next_tokens()[0]

    def _logits_at(self, place: int) -> NDArray[np.float32]:
        """Returns the logits of a token of the last batch."""
        return self._array(
            llama_cpp.llama_get_logits_ith(self._context, place), llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        )

    def _array(self, pointer: Any, n: int) -> NDArray[np.float32]:
        """Returns a copy of n numbers that llama.cpp points to."""
        self._placement.refuse_what_is_lost()
        if not pointer:
            raise SessionError(f"{self.gives}: no token has been decoded")
        return np.ctypeslib.as_array(pointer, (n,)).copy()
