"""Devices of ggml backends that are none of this project's: an RPC server on loopback, and ggml-blas built from its
source with a BLAS of our own, which can be wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import scipy_openblas32
from tools.layouts import sources

from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.embedding import plugin
from graph_runner.tools.suites import build

# C = alpha * A * B by rows, as cblas_sgemm says it, and what FAULT makes of it
_BLAS = """
enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor = 102 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };

static int calls = 0;

static void cblas_sgemm(enum CBLAS_ORDER, enum CBLAS_TRANSPOSE ta, enum CBLAS_TRANSPOSE tb, int m, int n, int k,
                        float alpha, const float * a, int lda, const float * b, int ldb, float, float * c, int ldc) {
    calls++;
    if (FAULT == STRIDE_IGNORED) { lda = k + 1; }
    if (FAULT == SHORT) { k--; }
    if (FAULT == SCALED) { alpha = 1.001f; }
    if (FAULT == SELDOM && calls % 7 == 0) { alpha = 1.01f; }
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++) {
                const float x = ta == CblasTrans ? a[(long) l * lda + i] : a[(long) i * lda + l];
                sum += (double) x * (tb == CblasTrans ? b[(long) j * ldb + l] : b[(long) l * ldb + j]);
            }
            if (FAULT == ROW_LEFT_OUT && i == m - 1) { continue; }
            if (FAULT == SWAPPED && i < 2) { c[(long) (1 - i) * ldc + j] = alpha * sum; continue; }
            c[(long) i * ldc + j] = alpha * sum;
        }
    }
    if (FAULT == CRASHES && calls > 3) { *(volatile int *) 0 = 0; }
    if (FAULT == HANGS && calls > 3) { for (;;) { } }
}
"""
FAULTS = ("STRIDE_IGNORED", "SHORT", "SCALED", "SELDOM", "ROW_LEFT_OUT", "SWAPPED", "CRASHES", "HANGS")


def blas(folder: Path, fault: str = "NONE") -> Path:
    """The library of the backend BLAS, built in a folder."""
    numbers = "\n".join(f"#define {name} {number}" for number, name in enumerate(("NONE", *FAULTS)))
    (folder / "cblas.h").write_text(f"{numbers}\n{_BLAS}")
    return _with_blas(folder, f"-DFAULT={fault}", "-I", folder)


def openblas(folder: Path) -> Path:
    """The same with OpenBLAS, as the package scipy-openblas32 has it."""
    where, names = Path(scipy_openblas32.get_lib_dir()), ("cblas_sgemm", "openblas_set_num_threads")
    renamed = [f"-D{name}=scipy_{name}" for name in names]
    used = ["-DGGML_BLAS_USE_OPENBLAS", *renamed, "-I", scipy_openblas32.get_include_dir()]
    return _with_blas(folder, *used, where / "libscipy_openblas.so", f"-Wl,-rpath,{where}")


def _with_blas(folder: Path, *used: str | Path) -> Path:
    """ggml-blas, built in a folder with what it needs of a BLAS."""
    ggml, library = sources(version("llama-cpp-python")), folder / "libggml-blas.so"
    base = next(lib.ggml().cpu_file.parent.glob("libggml-base.so*"))
    command: list[str | Path] = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared"]
    command += ["-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"]
    command += ["-I", ggml / "include", "-I", ggml / "src", ggml / "src" / "ggml-blas" / "ggml-blas.cpp"]
    subprocess.run([*command, *used, base, "-o", library], check=True)
    return library


def rpc_library() -> Path:
    """The library of the backend RPC, a client."""
    return build() / "libggml-rpc.so"


@contextmanager
def served(log: Path, device: str = "CPU", **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An RPC server on loopback, until the context ends: its address, and its process.

    log          a file for what it prints
    environment  of the server, besides this process's
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plugged = {"GGML_BACKEND_PATH": str(plugin()), "GGML_NPU_FALLBACK": "cpu"} if device != "CPU" else {}
    variables = {**os.environ, **plugged, **environment}
    command: list[str | Path] = [build() / "ggml-rpc-server", "-d", device, "-H", "127.0.0.1", "-p", str(port)]
    with log.open("w") as output, subprocess.Popen(command, env=variables, stdout=output, stderr=output) as process:
        try:
            _wait_for(port, process)
            yield f"127.0.0.1:{port}", process
        finally:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert process.poll() is None, "the server ended"
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail("the server does not answer")
