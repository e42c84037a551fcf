"""The codecs of q8_0 and q4_0 against ggml's functions and gguf-py: arrays in, new arrays out, on the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

import ggml_backend_npu
import quant
from ggml_backend_npu.ggml.codecs import of_files
from graph_runner.bench.measure import ELEMENTS, GGML, Measurement, against, in_turns
from quant.kernels.threads import Team

_WIDTH = 4096  # elements of a row

Job = Callable[[], NDArray[Any]]


def bench_codecs(*, rounds: int, threads: int, elements: int = ELEMENTS) -> Iterator[Measurement]:
    """Measures quant.quantize and quant.dequantize of `elements` float32 in `threads` threads of the backend; ggml's
    ggml_quantize_chunk and to_float, and gguf-py, use one. A value is the median of three calls: the first waits for a
    second core that went to sleep.

    Raises RuntimeError if the bytes of ggml or gguf-py differ from ours.
    """
    team = replace(ggml_backend_npu.register().backend.team, size=threads)
    x = np.random.default_rng(0).standard_normal((elements // _WIDTH, _WIDTH), dtype=np.float32)
    for number in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
        name = number.name.lower()
        blocks = quant.quantize(x, name)
        ggml = of_files(name)
        units = x.reshape(-1, ggml.block_size), blocks.reshape(-1, ggml.block_bytes)
        encoders: dict[str, Job] = {
            "quant": partial(_in_threads, team, partial(quant.quantize, x, name)),
            GGML: partial(ggml.encode, units[0], "reference"),
            "gguf-py": partial(gguf.quants.quantize, x, number),
        }
        decoders: dict[str, Job] = {
            "quant": partial(_in_threads, team, partial(quant.dequantize, blocks, name)),
            GGML: partial(ggml.decode, units[1]),
            "gguf-py": partial(gguf.quants.dequantize, blocks, number),
        }
        for group, jobs in (("quantize", encoders), ("dequantize", decoders)):
            what = f"{group} {name}"
            check_equal(what, jobs)
            yield against(in_turns(jobs, rounds, calls=3), what, "ms", nbytes=x.nbytes, group=group)


def _in_threads(team: Team, job: Job) -> NDArray[Any]:
    with team.working():
        return job()


def check_equal(what: str, jobs: Mapping[str, Job]) -> None:
    """Raises RuntimeError if a job's bytes differ from those of the first job."""
    (ours, job), *others = jobs.items()
    expected = job().view(np.uint8).ravel()
    for name, other in others:
        if not np.array_equal(other().view(np.uint8).ravel(), expected):
            raise RuntimeError(f"{what}: the bytes of {name} are not those of {ours}")
