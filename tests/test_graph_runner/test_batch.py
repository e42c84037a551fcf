"""Several sequences in one run: what is decoded together, and what a diff of it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kit import models
from kit.commands import Cli, kernel_file

from graph_runner.base.models import model_file
from graph_runner.run.batch import together, turned
from graph_runner.run.sampling import most_likely
from graph_runner.run.session import Session, Settings

PROMPT = "The bridge was closed in the winter of that year."
WRITERS = [
    models.write_tiny_moe, models.write_tiny_gpt_oss, models.write_tiny_rwkv7, models.write_tiny_mamba,
    models.write_tiny_mamba2, models.write_tiny_qwen35, models.write_tiny_mpt,
]  # fmt: skip
OF_STREAM_0 = """
import numpy as np
from dataclasses import replace
from ggml_backend_npu import op, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn

@op("FLASH_ATTN_EXT", params=FlashAttn)
def attend(dst, q, k, v, mask, sinks, params):
    k, v = (Tensor.of(np.repeat(x.view()[:1], x.ne[3], axis=0).copy(), x.type) for x in (k, v))
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)
"""

MASK_OF_STREAM_0 = """
from dataclasses import replace
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.softmax import SoftMax

@op("SOFT_MAX", params=SoftMax)
def soft_max(dst, x, mask, sinks, params):
    first = replace(mask, nb=(*mask.nb[:3], 0))
    OWN["SOFT_MAX"].define(dst, x, first, sinks, params=params)
"""


OF_FEW_COLUMNS = """
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.matmul import MulMat

ours = OWN["MUL_MAT"]

@op("MUL_MAT", types=ours.types, refuse=ours.refuse, params=MulMat)
def mul_mat(dst, a, b, params):
    ours.define(dst, a, b, params=params)
    if b.ne[1] == 4:
        dst.view()[:, :, -1] = 0
"""


def test_each_sequence_has_fewer_tokens_in_another_order() -> None:
    assert turned([1, 2, 3, 4, 5, 6, 7], 1, 3) == [[1, 2, 3, 4, 5, 6, 7], [1, 4, 5, 6, 7, 2], [1, 6, 7, 2, 3]]
    assert turned([5, 6], 0, 1) == [[5, 6]]
    assert turned([1], 1, 2) == [[1], [1]]
    assert turned([5, 6], 0, 3) == [[5, 6], [6], [5]]
    lengths = [*map(len, turned([*range(256)], 1, 256))]
    assert lengths == [*range(256, 0, -1)]


def test_sequences_of_other_lengths_end_together() -> None:
    a, b, c = [1, 2, 3, 4, 5], [6, 7, 8], [9]
    assert [*together([a, b, c], 512)] == [[[1, 2], [], []], [[3, 4], [6, 7], []], [[5], [8], [9]]]
    assert [*together([b, a], 2)] == [[[], [1, 2]], [[6], [3]], [[7], [4]], [[8], [5]]]
    assert [*together([[1], [2], [3]], 2)] == [[[1], [2], [3]]]


@pytest.mark.parametrize("n_prompt", [5, 900])
def test_what_is_decoded_together_is_what_each_gives_alone(n_prompt: int) -> None:
    """The prompt of 900 tokens takes several batches."""
    text = (PROMPT * 40)[:n_prompt]
    with model_file("tiny") as file:
        settings = Settings("cpu", n_ctx=1024, flash_attention="off", sequences=3)
        with Session(file, settings) as session:
            prompts = session.prompts(text)
            session.decode(*prompts)
            session.decode([7], [8], [9])
            together = session.logits_of_each()
            assert (together[-1] == session.logits()).all()
        assert len({tuple(each) for each in prompts}) == 3
        for i, (prompt, logits) in enumerate(zip(prompts, together, strict=True)):
            with Session(file, Settings("cpu", n_ctx=1024, flash_attention="off")) as session:
                session.decode(prompt)
                session.decode([7 + i])
                alone = session.logits()
                assert session.logits_of_each().tolist() == [alone.tolist()]
            np.testing.assert_allclose(logits, alone, rtol=1e-2, atol=1e-2 * np.abs(alone).max())


def test_the_most_likely_tokens() -> None:
    logits = np.array([0.5, 2.0, -1.0, 2.0, np.nan], np.float32)
    assert (most_likely(logits[:4], 1), most_likely(logits[:4], 3)) == ([1], [1, 3, 0])
    assert most_likely(logits, 3) == [4, 1, 3], "NaN is what the sampler takes"


def test_a_fault_in_products_of_few_columns_is_seen_by_a_draft(cli: Cli, tmp_path: Path) -> None:
    command = ["diff", "tiny", "-n", "1", "--kernels", kernel_file(tmp_path, OF_FEW_COLUMNS)]
    assert cli(*command).code == 0
    outcome = cli(*command, "--draft", "3", "--json", tmp_path / "result.json")
    assert outcome.code == 1
    assert ", draft of 3; NPU" in outcome.out
    assert json.loads((tmp_path / "result.json").read_text())["draft"] == 3
    assert "step 1 node" in outcome.out.partition("the first wrong node:")[2].splitlines()[1]
    assert "scope: 1 sequence of 30 tokens" in outcome.out
    refused = cli("diff", "tiny", "--draft", "65")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_a_number_of_sequences_that_no_context_has(cli: Cli) -> None:
    for number in ("0", "257", "many"):
        outcome = cli("diff", "tiny", "--sequences", number)
        assert outcome.code == 2
        assert number in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--all", "--flash-attn", "on", "--cache-type-k", "q8_0")])
def test_a_diff_of_sequences_is_right(cli: Cli, options: tuple[str, ...]) -> None:
    outcome = cli("diff", "tiny", "-n", "2", "--sequences", "3", "-p", PROMPT, *options)
    assert outcome.code == 0, outcome.out
    assert ", 3 sequences; " in outcome.out
    assert "scope: 3 sequences of " in outcome.out


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_kernel_that_takes_every_stream_for_the_first(cli: Cli, tmp_path: Path) -> None:
    """ne[3] ignored: no diff of one sequence can show it."""
    kernels = kernel_file(tmp_path, OF_STREAM_0)
    command = ("diff", "tiny", "-n", "1", "-p", PROMPT, "--all", "--flash-attn", "on", "--kernels", kernels)
    assert cli(*command).code == 0
    outcome = cli(*command, "--sequences", "2")
    assert outcome.code == 1
    assert "FLASH_ATTN_EXT" in outcome.out.splitlines()[1]
    assert "has each sequence of src0 meet sequence 0 of src1 and src2" in outcome.out


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_kernel_that_takes_the_mask_of_the_first_for_all(cli: Cli, tmp_path: Path) -> None:
    """The prompt alone shows it: sequences of other lengths have other masks."""
    kernels = kernel_file(tmp_path, MASK_OF_STREAM_0)
    command = ("diff", "tiny", "-n", "0", "-p", PROMPT, "--ops", "SOFT_MAX", "--kernels", kernels)
    assert cli(*command).code == 0
    outcome = cli(*command, "--sequences", "2")
    assert outcome.code == 1
    assert "takes index 0 of dimension 3 of src1 (the mask) for all" in outcome.out


@pytest.mark.slow
def test_a_node_of_sequences_is_captured_and_replayed(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.gguf"
    command = ("capture", "tiny", "-o", trace, "-n", "1", "-p", PROMPT, "--sequences", "2", "--flash-attn", "on")
    assert cli(*command, "--nodes", "FLASH_ATTN_EXT").code == 0
    assert cli("replay", trace).code == 0
    kernels = kernel_file(tmp_path, OF_STREAM_0)
    assert cli("replay", trace, "--kernels", kernels).code == 1


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("options", [(), ("--all",), ("--all", "--memory", "device", "--flash-attn", "on")], ids=str)
def test_models_are_right_with_three_sequences(
    cli: Cli, tmp_path: Path, write: Callable[[Path], Path], options: tuple[str, ...]
) -> None:
    outcome = cli("diff", write(tmp_path / "model.gguf"), "-n", "2", "--sequences", "3", "-p", PROMPT, *options)
    assert outcome.code == 0, outcome.out
