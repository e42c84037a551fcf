"""The examples run, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "inside_a_graph.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "RMS_NORM ignores the eps" in printed
    assert len(re.findall(r"(?m)^(?:attn|ffn)_\w+ +[01] +-?0\.\d{6} ", printed)) == 14  # tensors of two layers
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "says"), [([], "usage: "), (["m.gguf", "no-such-server"], "no-such-server: ")])
def test_the_server_says_what_it_needs(arguments: list[str], says: str) -> None:
    command: list[str | Path] = [sys.executable, EXAMPLES / "llama_server.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout, line.startswith(says)) == (2, "", True)


@pytest.mark.slow
def test_the_chat_answers() -> None:
    command: list[str | Path] = [sys.executable, EXAMPLES / "chat.py", "tiny"]
    done = subprocess.run(command, input="hello\n\n", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    computed, nodes = done.stdout.splitlines()[-1].removeprefix("> ").split(" nodes ")[0].split(" of ")
    assert computed == nodes


@pytest.mark.slow
def test_the_fixture_tells_a_wrong_kernel(tmp_path: Path) -> None:
    test = "\n".join(line[4:] for line in (EXAMPLES / "ggml_npu_fixture.py").read_text().splitlines()[4:7])
    (tmp_path / "test_sqr.py").write_text(f"import numpy as np\n{test}\n")
    (tmp_path / "wrong.py").write_text(
        "import ggml_backend_npu\n@ggml_backend_npu.op('SQR', types=[('f32', 'f32')])\n"
        "def sqr(dst, x):\n    dst.view()[...] = 2 * x.view()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    for plugins, code, says in (((), 0, "1 passed"), (("-p", "wrong"), 1, "SQR: bytes differ")):
        command = [sys.executable, "-m", "pytest", "-p", "ggml_npu_fixture", *plugins, "test_sqr.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert says in done.stdout


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("generate.py", "nodes on the NPU"),
        ("diff_model.py", "right within rounding: "),
        ("perplexity.py", "NPU, exact"),
        ("find_a_bug.py", "CONT ignores the strides from nb[1] on of src0"),
    ],
)
def test_an_example_runs(name: str, says: str) -> None:
    command: list[str | Path] = [sys.executable, EXAMPLES / name, "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200)
        self.end_headers()
        plugin = os.path.exists(os.environ["GGML_BACKEND_PATH"])
        self.wfile.write(json.dumps({"content": f"{self.path} {plugin} {sys.argv[1:5]}"}).encode())
    do_GET = do_POST = answer

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answers).serve_forever()
"""


@pytest.mark.slow
def test_the_server_is_started_with_the_plugin_and_asked(tmp_path: Path) -> None:
    """What the example does around llama-server, of which a script takes the place."""
    server = tmp_path / "server"
    server.write_text(f"#!{sys.executable}{STAND_IN}")
    server.chmod(0o755)
    command: list[str | Path] = [sys.executable, EXAMPLES / "llama_server.py", "model.gguf", server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "/completion True ['-m', 'model.gguf', '-dev', 'NPU']\n", done.stderr
