"""Models that encode, or make embeddings: each node of their graphs is judged, and what they give at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import PoolingType
from kit.backends import blas, rpc_library, served
from kit.commands import Cli, assert_refused, fresh, kernel_file
from kit.diffs import FLASH_OFF, FLASH_ON, beside_another, planted
from kit.encoders import ENCODERS, write_tiny_embedder
from kit.models import Models
from kit.support import choose

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import Settings
from graph_runner.diff import DiffOptions, again
from graph_runner.diff.logits import Ending, Endings
from graph_runner.diff.run import DiffResult, diff
from graph_runner.judging.results import OWN_RUN
from graph_runner.reports.diff_report import diff_json
from graph_runner.run.session import Session

PROMPT = "the quick brown fox jumps over the lazy dog"
CPU = Settings("cpu", n_ctx=256, flash_attention="off", threads=1)
pytestmark = pytest.mark.usefixtures("as_before")

# a mask of attention that is left out where keys are not in a cache: in T5's decoder, of what was encoded
NO_MASK = """
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn

@op("FLASH_ATTN_EXT", params=FlashAttn)
def attend(dst, q, k, v, mask, sinks, params):
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, None, sinks, params=params)
"""


def run(file: Path, settings: Settings = FLASH_OFF, steps: int = 2) -> DiffResult:
    return diff(file, PROMPT[:25], DiffOptions(steps=steps, settings=settings))


def outputs(file: Path, *texts: str, settings: Settings = CPU) -> np.ndarray:
    """What the first step of a model gives for texts, each a sequence."""
    with Session(file, replace(settings, sequences=len(texts))) as session:
        session.decode(*map(session.tokenize, texts))
        assert session.gives == "embeddings"
        return session.outputs()


# what a session does with them


def test_a_model_says_what_it_gives(model: Models) -> None:
    """Embeddings of each token, and those of sequences that are made of them."""
    tokens, mean, first = (outputs(model(name), PROMPT) for name in ("bert of tokens", "bert", "bert of the first"))
    assert tokens.shape == (len(PROMPT.replace(" ", "")) + 2, 64)
    np.testing.assert_allclose(mean, tokens.mean(axis=0, keepdims=True), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(first, tokens[:1])
    assert outputs(model("embedder"), PROMPT).shape == outputs(model("embedder of means"), PROMPT).shape == (1, 64)
    np.testing.assert_array_equal(outputs(model("t5"), PROMPT), outputs(model("t5encoder"), PROMPT))


def test_a_decoder_of_which_no_pooling_is_said_gives_logits(tmp_path: Path) -> None:
    for pooling in (PoolingType.NONE, 2**32 - 1):
        with Session(write_tiny_embedder(tmp_path / "model.gguf", pooling), CPU) as session:
            session.decode([5, 6])
            assert (session.gives, session.n_steps(3)) == ("logits", 4)


@pytest.mark.parametrize("name", ENCODERS)
def test_what_is_encoded_together_is_what_each_gives_alone(model: Models, name: str) -> None:
    texts = PROMPT, PROMPT[:20]
    together, alone = outputs(model(name), *texts), np.concatenate([outputs(model(name), text) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-2 * np.abs(alone).max())


def test_a_decoder_begins_after_the_prompt_was_encoded(model: Models) -> None:
    with Session(model("t5"), CPU) as session:
        for _ in range(2):
            assert session.encodes
            assert session.n_steps(3) == 5
            session.decode(session.tokenize(PROMPT))
            assert (session.gives, session.encodes) == ("embeddings", False)
            assert session.next_tokens() == [[0]]
            session.decode([0])
            assert session.gives == "logits"
            assert session.outputs().shape == (1, 98)
            session.clear()
    with Session(model("bert"), CPU) as session:
        session.decode([5, 6])
        assert session.n_steps(3) == 1
        with pytest.raises(SessionError, match="has no next token"):
            session.next_tokens()


def test_a_prompt_that_is_longer_than_the_model_is_refused(model: Models) -> None:
    with Session(model("bert"), replace(CPU, n_ctx=1024)) as session:
        session.decode([5] * 512)
        with pytest.raises(SessionError, match=r"^513 tokens: the model takes at most 512 at once$"):
            session.decode([5] * 513)
        with pytest.raises(SessionError, match=r"^1,025 tokens: a graph of this context has at most 1,024$"):
            session.decode([5] * 1025)


@pytest.mark.slow
def test_other_commands_run_them_or_say_in_a_line_that_they_do_not(cli: Cli, model: Models, tmp_path: Path) -> None:
    texts = [cli("run", model("t5"), "-p", PROMPT, "-n", "5", "--device", device) for device in ("cpu", "npu")]
    assert [each.code for each in texts] == [0, 0]
    assert texts[0].out == texts[1].out != "\n"
    texts = [cli("run", model("embedder"), "-p", PROMPT, "-n", "5", option) for option in ("--all", "--no-llama-graph")]
    assert texts[0].out == texts[1].out != "\n", "a model that decodes and pools has a text too"
    for name in ("bert", "t5encoder"):
        assert_refused(cli("run", model(name), "-p", PROMPT), "the model has no text", "embeddings")
    assert_refused(cli("run", model("t5"), "-p", PROMPT, "--no-llama-graph"), "models that only decode")
    assert_refused(cli("record", model("t5"), "-o", tmp_path / "r.gguf", "--batch", "3"), "--batch 3", "in one graph")
    assert_refused(cli("bisect", model("bert"), "-p", PROMPT, "--all", "--text"), "--text", "embeddings")
    assert_refused(cli("bench", "decode", "--model", model("t5")), "has an encoder")
    for name in ("t5", "bert"):
        with Session(model(name), CPU) as session, pytest.raises(SessionError, match="the model encodes"):
            session.logits_of_last([5, 6], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_records_of_them_are_compared(cli: Cli, model: Models, tmp_path: Path, name: str) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    assert cli("record", model(name), "-o", one, "-p", PROMPT, "-n", "1").code == 0
    assert cli("record", model(name), "-o", other, "-p", PROMPT, "-n", "1").code == 0
    outcome = cli("compare", one, other)
    assert outcome.code == 0
    ends = {"bert": "embeddings: equal after 1 steps", "t5": "embeddings and logits: equal after 3 steps"}
    assert ends[name] in outcome.out
    assert cli("record", model(name), "-o", other, "-p", PROMPT[1:], "-n", "1").code == 0
    assert cli("compare", one, other).code == 1


# diffs


@pytest.mark.parametrize("settings", [FLASH_OFF, replace(FLASH_ON, sequences=2)], ids=["one", "two, flash on"])
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.usefixtures("every_op")
def test_every_node_is_judged(model: Models, name: str, settings: Settings) -> None:
    result = run(model(name), settings)
    assert result, (result.wrong[:1], result.stopped)
    assert not result.not_judged
    assert result.is_unobserved
    of, last = ("embeddings and logits", 3) if name == "t5" else ("embeddings", 0)
    assert result.ending is not None
    assert (result.ending.of, result.ending.kl is None) == (of, name != "t5")
    assert result.ending.nmse < 1e-6
    assert (result.steps, {node.step for node in result.nodes}) == (last, {*range(last + 1)})


@pytest.mark.slow
def test_reports_name_what_is_compared_at_the_end(cli: Cli, model: Models, tmp_path: Path) -> None:
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    options = ("-p", PROMPT, "-n", "1", "--all", "--matmul", "fast", "--html", page, "--json", found)
    outcome = cli("diff", model("bert"), *options)
    assert outcome.code == 0
    assert "\nembeddings: NMSE " in outcome.out
    assert "nats" not in outcome.out
    assert "; ends in embeddings; " in page.read_text()
    ending = json.loads(found.read_text())["ending"]
    assert (ending["of"], ending["kl"], ending["passed"]) == ("embeddings", None, True)
    assert 0 < ending["nmse"] <= ending["limit"]
    outcome = cli("diff", model("t5"), *options)
    assert outcome.code == 0
    assert "\nembeddings and logits: NMSE " in outcome.out
    assert "; ends in embeddings and logits; " in page.read_text()


def test_embeddings_have_no_most_likely_token() -> None:
    a, b = np.array([[1, 2, 3]], np.float32), np.array([[3, 2, 1]], np.float32)
    endings = Endings()
    endings.add(a, b, "embeddings")
    assert endings.ending() == Ending(8 / 14, None, None, of="embeddings")
    endings.add(a, a, "logits")
    assert endings.ending() == Ending(8 / 14, 0.0, None, of="embeddings and logits")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "op", "of"), [("bert", "NORM", "embeddings"), ("t5", "RMS_NORM", "embeddings and logits")]
)
def test_an_end_that_is_off_is_wrong(model: Models, name: str, op: str, of: str) -> None:
    """One last bit more in each norm."""

    def norm(dst: Tensor, x: Tensor, params: Params) -> None:
        OWN[op].define(dst, x, params=params)
        dst.view()[...] = np.nextafter(dst.view(), np.float32(np.inf))

    with default_backend().ops.having(planted(op, norm)), pytest.MonkeyPatch.context() as patch:
        choose(patch, ops="all")
        result = run(model(name))
        assert result, result.wrong[:1]
        assert result.ending is not None
        assert 0 < result.ending.nmse <= result.ending.limit  # type: ignore[operator]
        patch.setattr(again, "_FAR", 0.0)
        patch.setattr(again, "_NOTHING", 0.0)
        result = run(model(name))
    assert not result
    wrong = f"wrong: every node is right, but the {of} differ by more than rounding explains"
    assert diff_json(result)["verdict"] == wrong


# faults


def test_a_fault_in_an_encoder_is_named(model: Models) -> None:
    """The decoder has one token at a time, and is right."""

    def geglu(dst: Tensor, a: Tensor, b: Tensor | None = None, params: object = None) -> None:
        OWN["GEGLU"].define(dst, a, b, params=params)
        if dst.ne[1] > 1 and dst.name == "ffn_geglu-1":
            dst.view()[0, 0, -1] *= np.float32(1.01)

    with default_backend().ops.having(planted("GEGLU", geglu)), pytest.MonkeyPatch.context() as patch:
        choose(patch, ops="all")
        result = run(model("t5"))
    (wrong,) = result.wrong
    assert (wrong.step, wrong.op, wrong.name) == (0, "GEGLU", "ffn_geglu-1")


@pytest.mark.slow
def test_a_fault_in_attention_to_what_was_encoded_is_named(cli: Cli, model: Models, tmp_path: Path) -> None:
    """T5 has flash attention there alone. One sequence has a mask that lets all be seen."""
    kernels = kernel_file(tmp_path, NO_MASK)
    found = tmp_path / "found.json"
    command = ("diff", model("t5"), "-p", PROMPT, "-n", "1", "--all", "-fa", "on", "--kernels", kernels)
    assert cli(*command).code == 0
    assert cli(*command, "--sequences", "2", "--json", found).code == 1
    nodes = json.loads(found.read_text())["nodes"]
    wrong = [node for node in nodes if not node["passed"]]
    assert [(node["step"], node["op"]) for node in wrong] == [(step, "FLASH_ATTN_EXT") for step in (1, 1, 2, 2)]
    assert wrong[0]["diagnosis"] == "FLASH_ATTN_EXT leaves out src3 (the mask), which gives exactly these bytes"


def test_a_node_of_an_encoder_that_is_right_only_when_it_is_looked_at_is_named(model: Models) -> None:
    is_beside_another = beside_another()

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if is_beside_another() and dst.name.startswith("kqv_out-1"):
            dst.view()[..., 0] += 1

    with default_backend().ops.having(planted("CONT", cont)), pytest.MonkeyPatch.context() as patch:
        choose(patch, ops="all")
        result = run(model("bert"))
    (wrong,) = result.wrong
    assert (wrong.step, wrong.wrong_in) == (0, OWN_RUN)


# devices of other backends


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_other_backends_are_right(model: Models, tmp_path: Path, name: str) -> None:
    library = blas(tmp_path)
    with served(tmp_path / "log") as (address, _):
        ways = [
            ("BLAS", "--backend", library),
            ("RPC0", "--backend", rpc_library(), "--rpc", address, "-fa", "on", "--sequences", "2"),
        ]
        for device, *options in ways:
            found = tmp_path / "found.json"
            command = ("diff", model(name), "-p", PROMPT, "-n", "1", "--reference", "cpu", "--device", device)
            outcome = fresh(*command, *options, "--json", found)
            assert outcome.code == 0, outcome.out + outcome.err
            data = json.loads(found.read_text())
            assert data["ending"]["of"].startswith("embeddings")
            assert data["ending"]["nmse"] is not None
            assert data["own_run"]["not_judged"] == 0


@pytest.mark.slow
def test_a_fault_of_another_backend_is_named(model: Models, tmp_path: Path) -> None:
    library = blas(tmp_path, "SCALED")
    command = ("diff", model("t5"), "-p", PROMPT, "-n", "1", "--reference", "cpu", "--device", "BLAS")
    outcome = fresh(*command, "--backend", library)
    assert outcome.code == 1
    assert "MUL_MAT" in outcome.out.splitlines()[1]
    assert outcome.out.splitlines()[1].startswith("step 0 ")
