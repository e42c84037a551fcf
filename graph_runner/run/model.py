"""A model that llama.cpp has loaded, with its adapters."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from ggml_backend_npu.ggml import llama
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.base.errors import SessionError
from graph_runner.base.limits import free_memory
from graph_runner.base.models import check_file
from graph_runner.base.settings import Settings
from graph_runner.run import llama_log
from graph_runner.run.placement import Placement

llama_cpp = llama.functions()
_DRAFTS = ("eagle3", "dflash")  # they read what another model's layers give
_EMBEDDINGS = rb"^(token_embd|position_embd|token_types|per_layer_token_embd)\."


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override: the buffer type for tensors whose name matches a pattern."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class Model:
    """A model that llama.cpp has loaded.

    progress  called with 0..1 while it loads
    handle    llama.cpp's

    Raises SessionError if llama.cpp refuses it, or the device cannot hold it.
    """

    def __init__(
        self, path: Path, settings: Settings, placement: Placement, progress: Callable[[float], None] | None
    ) -> None:
        self._path, self._settings, self._placement = path, settings, placement
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = settings.repack  # repacked weights are invisible to any backend but the CPU's own
        params.no_alloc = not settings.weights
        if params.no_alloc and hasattr(params, "load_mode"):
            params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        elif params.no_alloc:
            params.use_mmap = False
        params.n_gpu_layers = placement.n_layers
        if placement.of_layers is not None:
            handles = [each.handle for each in placement.of_layers.each]
            self._devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
            params.devices = ctypes.addressof(self._devices)
        embeddings = placement.of_embeddings
        own = [_Override(_EMBEDDINGS, embeddings)] if embeddings is not None else []
        overrides = (_Override * (len(own) + 1))(*own, _Override())
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        if progress is not None:
            self._progress = llama_cpp.llama_progress_callback(lambda done, _: (progress(done), True)[1])
            params.progress_callback = self._progress
        llama_log.forget()
        with placement.loading():
            self.handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            npu = placement.npu
            why = placement.failures.message if npu is not None and npu.memory is not None else None
            raise SessionError(f"model {str(path)!r}: {why or llama_log.reason()}")
        try:
            placement.refuse_what_is_lost()
        except SessionError:
            self.free()
            raise

    def free(self) -> None:
        """Frees the model and its adapters."""
        llama_cpp.llama_model_free(self.handle)

    def said(self, key: str) -> str:
        """Returns what its metadata say under a key, "" if nothing. {arch} in the key is the architecture."""
        arch = "" if key == "general.architecture" else self.said("general.architecture")
        text = ctypes.create_string_buffer(64)
        llama_cpp.llama_model_meta_val_str(self.handle, key.format(arch=arch).encode(), text, len(text))
        return text.value.decode(errors="replace")

    @property
    def has_encoder(self) -> bool:
        """Whether a prompt is encoded, by a graph without caches."""
        return bool(llama_cpp.llama_model_has_encoder(self.handle))

    @property
    def has_decoder(self) -> bool:
        """Whether it has a graph that decodes; llama.cpp says so of models without caches too."""
        return bool(llama_cpp.llama_model_has_decoder(self.handle))

    @property
    def is_pooled(self) -> bool:
        """Whether it makes one embedding of each sequence, and is not run for its text."""
        return bool(self._pooling > llama_cpp.LLAMA_POOLING_TYPE_NONE) and not self._settings.text

    @property
    def takes_all(self) -> bool:
        """Whether a prompt must be in one graph: since each token sees all others, or all are pooled."""
        is_diffusion = bool(llama_cpp.llama_model_is_diffusion(self.handle))
        sees_all = is_diffusion or self.said("{arch}.attention.causal") == "false"
        takes_last = bool(self._pooling == llama_cpp.LLAMA_POOLING_TYPE_LAST)
        return self.has_encoder or sees_all or (self.is_pooled and not takes_last)

    @property
    def _pooling(self) -> int:
        found = int(self.said("{arch}.pooling_type") or llama_cpp.LLAMA_POOLING_TYPE_NONE)
        return found if found <= llama_cpp.LLAMA_POOLING_TYPE_RANK else 0  # -1, without a sign, is unspecified

    @property
    def decoder_begins_with(self) -> int:
        """The token that its decoder begins with after a prompt was encoded. Raises SessionError if it has none."""
        vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        found = int(llama_cpp.llama_model_decoder_start_token(self.handle))
        found = int(llama_cpp.llama_vocab_bos(vocabulary)) if found < 0 else found
        if not 0 <= found < llama_cpp.llama_vocab_n_tokens(vocabulary):
            raise SessionError(f"model {str(self._path)!r}: has no token that its decoder begins with")
        return found

    def refuse_drafts(self) -> None:
        """Raises SessionError for a model that drafts for another one."""
        arch = self.said("general.architecture")
        if arch in _DRAFTS:
            raise SessionError(f"model {str(self._path)!r}: {arch} reads what layers of another model give")

    def refuse_caches_without_memory(self, ggml: Ggml) -> None:
        """Raises SessionError for caches that are larger than the memory that is free: llama.cpp fills them with zeros,
        and the system would end the process, or another one."""
        settings, model, npu = self._settings, self.handle, self._placement.npu
        heads = llama_cpp.llama_model_n_head(model), llama_cpp.llama_model_n_head_kv(model)
        row = llama_cpp.llama_model_n_embd(model) // max(1, heads[0]) * heads[1]
        types = (ggml.types[ggml.type_numbers[name]] for name in (settings.cache_type_k, settings.cache_type_v))
        cell = sum(-(-row // each.block_size) * each.block_bytes for each in types)
        n_cells = settings.n_ctx * settings.sequences
        needed, free = n_cells * llama_cpp.llama_model_n_layer(model) * cell, free_memory()
        on_host = npu is None or npu.buffer_type is None
        if on_host and settings.weights and free is not None and needed > free:
            sizes = f"its caches take some {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            raise SessionError(f"context of {n_cells} cells: {sizes}")

    def adapt(self, context: int) -> None:
        """Adds the LoRA adapters of the settings to a context. Raises SessionError for one that llama.cpp refuses."""
        adapters = []
        for file in self._settings.loras:
            check_file(file, "adapter")
            llama_log.forget()
            with self._placement.loading():
                adapters.append(llama_cpp.llama_adapter_lora_init(self.handle, os.fsencode(file)))
            if not adapters[-1]:
                raise SessionError(f"adapter {str(file)!r}: {llama_log.reason()}")
        if adapters:
            pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
            scales = (ctypes.c_float * len(adapters))(*(1.0 for _ in adapters))
            llama_cpp.llama_set_adapters_lora(context, pointers, len(adapters), scales)
