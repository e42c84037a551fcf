"""A user's kernels: a Python file that adds or replaces ops, with the same decorator as the project's own."""

from __future__ import annotations

import os
from pathlib import Path

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Op, recording
from ggml_backend_npu.registry.user_files import FileError, run_file
from ggml_backend_npu.user_texts import no_file
from quant.errors import UserError


class KernelFileError(UserError):
    """A file of kernels that cannot be used: one line that names the file, the line and the reason."""


def named_by_the_environment() -> list[Path]:
    """The files in GGML_NPU_KERNELS, which os.pathsep separates."""
    return [Path(name) for name in os.environ.get("GGML_NPU_KERNELS", "").split(os.pathsep) if name]


def load_kernels(path: Path, backend: AnyBackend) -> dict[str, str]:
    """Runs a file of kernels, and adds the ops that it registers to a backend. Returns what became of each: {"SQR":
    "new", "CONT": "replaced"}.

    The file runs as a program, and can import other files of its folder. Raises KernelFileError for a file that is
    missing, fails, or registers nothing, an op twice, an op that ggml does not have, or one with too few sources; then
    none of its ops are added.
    """
    if not path.is_file():
        raise KernelFileError(f"kernels {str(path)!r}: {no_file(path)}")
    with recording() as added:
        try:
            run_file(path, f"kernels_{path.stem}")
            _check(added)
        except FileError as error:
            raise KernelFileError(f"kernels {str(path)!r}{error}") from None
        except KernelFileError as error:
            raise KernelFileError(f"kernels {str(path)!r}: {error}") from None
    found = {op.name: "replaced" if op.name in backend.op_names else "new" for op in added}
    backend.ops.add(*added)
    return found


def _check(added: list[Op]) -> None:
    """Raises KernelFileError where a file registered something that cannot be right."""
    if not added:
        raise KernelFileError("registers no op")
    ggml = lib.ggml()
    lines: dict[str, int] = {}
    for op in added:
        line = op.define.__code__.co_firstlineno
        if op.name not in ggml.op_names:
            raise KernelFileError(ggml.has_no_op(op.name))
        if op.name in lines:
            raise KernelFileError(f"registers {op.name} twice, at lines {lines[op.name]} and {line}")
        if op.name in OWN and op.n_src < OWN[op.name].n_src:
            raise KernelFileError(
                f"line {line}: kernel {op.define.__name__} takes {op.n_src} of the {OWN[op.name].n_src} sources "
                f"that {op.name} has; one that a node leaves out is None"
            )
        lines[op.name] = line
