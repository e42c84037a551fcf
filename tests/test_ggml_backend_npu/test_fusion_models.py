"""Models with fused nodes write what they write without, and the command counts what ran as one operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from kit.commands import Outcome, fresh
from kit.fusing import nmse
from kit.models import WRITERS, Models
from kit.support import assert_same_bytes, choose, engine
from numpy.typing import NDArray

from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base import tiny
from graph_runner.cli.options import PROMPT
from graph_runner.run.session import DeviceName, Sampler, Session, Settings, context_for, generate

N = 64
SPANS = {
    "rwkv7": {"token_shift": 2},
    "moe": {"TopKSoftmax": 2, "masked_softmax": 2},
    "olmoe": {"TopKSoftmax": 2, "masked_softmax": 2},
    "gpt-oss": {"TopKSoftmax": 2, "masked_softmax": 2},
}  # per step; each model has 2 layers

pytestmark = pytest.mark.usefixtures("all_fused")


@pytest.fixture(scope="session")
def f32_model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models of `model` with matrices of F32: there, rounding in a softmax stays as small as it is."""
    folder = tmp_path_factory.mktemp("f32 models")

    @cache
    def find(name: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "F16", GGMLQuantizationType.F32)
            return WRITERS[name](folder / f"{name}.gguf")

    return find


@dataclass(frozen=True)
class Decoded:
    """64 greedy tokens, the logits before each, and what was fused."""

    text: bytes
    logits: NDArray[np.float32]
    spans: Counter[str]


def decoded(file: Path, device: DeviceName, fusion: str = "on", cache_type: str = "f32") -> Decoded:
    settings = Settings(
        device=device,
        n_ctx=context_for(PROMPT, N),
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        flash_attention="off",
        threads=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, fusion=fusion)
        with Session(file, settings) as session:
            tokens = session.tokenize(PROMPT)
            steps = [(session.piece(t), session.logits()) for t in generate(session, tokens, N, Sampler())]
            assert len(steps) == N
            pieces, logits = zip(*steps, strict=True)
            return Decoded(b"".join(pieces), np.array(logits), session.npu_spans)


@pytest.mark.some(2)
@pytest.mark.daily(2)
@pytest.mark.parametrize("name", SPANS)
def test_a_model_decodes_as_on_the_cpu_with_every_span_counted(f32_model: Models, name: str) -> None:
    file = f32_model(name)
    cpu, fused, alone = decoded(file, "cpu"), decoded(file, "npu"), decoded(file, "npu", "off")
    assert cpu.text == fused.text == alone.text
    assert not cpu.spans
    assert fused.spans == {span: count * N for span, count in SPANS[name].items()}
    assert not alone.spans
    for step in range(N):
        assert nmse(fused.logits[step], cpu.logits[step]) < 1e-10
        assert nmse(fused.logits[step], alone.logits[step]) < 1e-10
    if name == "rwkv7":
        assert_same_bytes(fused.logits, alone.logits)


@pytest.mark.parametrize("name", SPANS)
def test_a_model_of_f16_writes_the_same_text(model: Models, name: str) -> None:
    """A last bit of a softmax may round an activation to the next float16 there, so logits are less close."""
    cpu, fused = (decoded(model(name), device, cache_type="f16") for device in ("cpu", "npu"))
    assert fused.text == cpu.text
    assert nmse(fused.logits, cpu.logits) < 1e-5


@pytest.mark.parametrize("name", SPANS)
def test_the_reference_engine_fuses_nothing(backend: Plugin, model: Models, name: str) -> None:
    with engine(backend, "reference"), Session(model(name), Settings(device="npu", flash_attention="off")) as session:
        session.decode([5, 6, 7])
        session.decode([8])
        assert not session.npu_spans
        assert session.npu_nodes["ADD"]


def test_only_the_ops_that_the_device_takes_are_fused(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, ops="default")
    assert not decoded(model("moe"), "npu").spans


ELSEWHERE = """
import json, sys
from pathlib import Path
import numpy as np
from dataclasses import replace
from ggml_backend_npu import default_backend
from graph_runner.run.session import Sampler, Session, Settings, context_for, generate
told = {}
for file in sys.argv[1:]:
    runs = []
    for device, fusion in (("cpu", "on"), ("npu", "off"), ("npu", "on")):
        default_backend().options = replace(default_backend().options, fusion=fusion)
        settings = Settings(
            device=device, n_ctx=256, cache_type_k="f32", cache_type_v="f32", flash_attention="off", threads=1,
            gpu_layers=99,
        )
        with Session(Path(file), settings) as session:
            tokens = session.tokenize("The capital of France is")
            steps = [(t, session.logits()) for t in generate(session, tokens, 64, Sampler())]
            runs.append((*map(np.array, zip(*steps)), session.npu_spans))
    (text, logits, none), (alone, beside, off), (fused, found, spans) = runs
    told[Path(file).stem] = {
        "same text": bool((text == fused).all() and (text == alone).all()),
        "same logits": bool((found == beside).all()),
        "nmse": float(np.square(found - logits).sum() / np.square(logits).sum()),
        "none": none, "off": off, "spans": spans,
    }
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "device_type", "moe"),
    [
        pytest.param("host", "gpu", SPANS["moe"], marks=pytest.mark.slow),
        pytest.param("device", "accel", SPANS["moe"], marks=pytest.mark.slow),
        ("device", "gpu", SPANS["moe"]),
    ],
)
def test_models_are_fused_wherever_their_tensors_lie(
    f32_model: Models, memory: str, device_type: str, moe: dict[str, int]
) -> None:
    options = {"GGML_NPU_MEMORY": memory, "GGML_NPU_DEVICE_TYPE": device_type, "GGML_NPU_OPS": "all"}
    command = [sys.executable, "-c", ELSEWHERE, *(str(f32_model(name)) for name in SPANS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | options, check=False)
    assert done.returncode == 0, done.stderr
    for name, run in json.loads(done.stdout).items():
        assert run["same text"]
        assert run["nmse"] < 1e-10
        assert run["same logits"] or name != "rwkv7"
        assert run["spans"] == {span: count * N for span, count in (SPANS | {"moe": moe, "olmoe": moe})[name].items()}
        assert run["none"] == run["off"] == {}


# the command


def command(*arguments: object, **options: str) -> Outcome:
    """The command in a process of its own, with variables in its environment."""
    return fresh(*arguments, env=os.environ | options)


@pytest.mark.slow
def test_run_says_what_ran_as_one_operator(model: Models) -> None:
    rest = ["--flash-attn", "off", "-n", "16"]
    cpu, fused, alone = (
        command("run", model("moe"), *options, *rest)
        for options in (["--device", "cpu"], ["--all"], ["--all", "--no-fusion"])
    )
    assert cpu.code == fused.code == alone.code == 0
    assert cpu.out == fused.out == alone.out
    assert cpu.out.strip()
    (line,) = (line for line in fused.err.splitlines() if "one operator" in line)
    head, spans = line.split(": ")
    assert head == "run as one operator"
    assert {*spans.split(", ")} == {"TopKSoftmax 32", "masked_softmax 32"}
    assert "one operator" not in cpu.err + alone.err


@pytest.mark.slow
def test_the_environment_says_the_same_as_the_options(model: Models) -> None:
    options = ["run", model("rwkv7"), "-n", "4"]
    assert "run as one operator: token_shift 8" in command(*options, GGML_NPU_OPS="all").err
    off = command(*options, GGML_NPU_OPS="all", GGML_NPU_FUSION="off")
    assert off.code == 0
    assert "one operator" not in off.err


@pytest.mark.slow
def test_diff_has_spans_or_not(model: Models) -> None:
    with_spans, without = (command("diff", model("rwkv7"), "-n", "0", *options) for options in ([], ["--no-fusion"]))
    assert with_spans.code == without.code == 0
    assert "token_shift" in with_spans.out
    assert "token_shift" not in without.out


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "allowed"), [("GGML_NPU_OPS", "default, all"), ("GGML_NPU_FUSION", "on, off")])
def test_an_option_that_cannot_be_is_refused_in_one_line(name: str, allowed: str) -> None:
    done = command("run", "tiny", **{name: "x"})
    assert done.code == 2
    assert not done.out
    assert done.err == f"ggml-npu: {name}='x': must be one of {allowed}\n"
