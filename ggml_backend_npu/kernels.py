"""A user's kernels: a Python file that registers or replaces ops with the same decorator as the project's own."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path

from ggml_backend_npu.abi import lib
from ggml_backend_npu.registry import OPS


class KernelFileError(Exception):
    """A file of kernels that cannot be used: one line that names the file, the line and why."""


def load_kernels(path: Path) -> dict[str, str]:
    """Runs a file of kernels. Returns what became of each op that it registered: {"SQR": "new", "CONT": "replaced"}.

    Raises KernelFileError for a file that is missing, fails, registers nothing or an op that ggml has not.
    """
    if not path.is_file():
        raise KernelFileError(f"kernels {str(path)!r}: no such file")
    before = dict(OPS)
    spec = importlib.util.spec_from_file_location(f"kernels_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise KernelFileError(f"kernels {str(path)!r}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        text = error.msg if isinstance(error, SyntaxError) else error
        raise KernelFileError(f"kernels {str(path)!r}{_line(path, error)}: {type(error).__name__}: {text}") from None
    changed = [name for name in OPS if OPS[name] is not before.get(name)]
    ggml = lib.ggml()
    if not changed:
        raise KernelFileError(f"kernels {str(path)!r}: registers no op")
    for name in changed:
        if name not in ggml.op_names:
            raise KernelFileError(f"kernels {str(path)!r}: ggml {ggml.version} has no op {name!r}")
    return {name: "replaced" if name in before else "new" for name in changed}


def _line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f" line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" line {lines[-1]}" if lines else ""
