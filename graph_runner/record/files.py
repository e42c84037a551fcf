"""A recorded run as a GGUF file."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from ggml_backend_npu.user_texts import no_file
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import replacing
from graph_runner.base.sealed import Seal
from graph_runner.record.forms import form_from, form_json
from graph_runner.record.measures import ROW
from graph_runner.record.run import N_TOP, About, End, Run, Step

FORMAT = 2
_SEAL = Seal("record")
_NAN_AT = ROW.itemsize - 4  # the numbers of NaN, nearly all 0, are kept apart and compressed
_NONE = np.zeros(0, np.uint8)
_END = np.dtype([("row", ROW), ("tokens", "<i4", N_TOP), ("logits", "<f4", N_TOP)])
_COMPRESSED = {"nan": np.dtype("<u4"), "ends": _END}


def write_run(path: Path, run: Run) -> None:
    """Writes a run, whole or not at all. Raises BadInputError for a file that cannot be written."""
    index = {
        "about": asdict(run.about),
        "state": run.state,
        "forms": [form_json(form) for form in run.forms],
        "steps": [
            {
                "tokens": step.tokens, "form": step.form, "sizes": step.sizes, "rows": len(step.rows),
                "ends": len(step.ends),
            }
            for step in run.steps
        ],
        "data": [*run.data],
        "logits": [[step, *logits.shape] for step, logits in run.logits.items()],
    }  # fmt: skip
    rows = np.concatenate([np.zeros(0, ROW), *(step.rows for step in run.steps)])
    ends = np.array([_end(end) for step in run.steps for end in step.ends], _END)
    tensors = {
        "index": _compressed(json.dumps(index, separators=(",", ":")).encode()),
        "rows": rows.view(np.int8).reshape(-1, ROW.itemsize)[:, :_NAN_AT].reshape(-1),
        "nan": _compressed(rows["nan"].tobytes()),
        "ends": _compressed(ends.tobytes()),
    }
    tensors |= {f"data.{step}.{place}": data.view(np.int8) for (step, place), data in run.data.items()}
    tensors |= {f"logits.{step}": logits.reshape(-1).view(np.int8) for step, logits in run.logits.items()}
    try:
        with replacing(path) as partial:
            writer = _SEAL.writer(partial)
            writer.add_uint32("record.format", FORMAT)
            for name, data in tensors.items():
                if data.size:
                    writer.add_tensor(name, data)
            _SEAL.finish(writer, partial)
    except OSError as error:
        raise BadInputError(f"record {str(path)!r}: {error.strerror or error}") from None


def _compressed(data: bytes) -> NDArray[np.int8]:
    return np.frombuffer(zlib.compress(data), np.int8)


def _end(end: End) -> tuple[Any, ...]:
    """Returns an end as _END has it: a vocabulary of fewer tokens is filled up with -1."""
    missing = N_TOP - len(end.tokens)
    return end.row[0], (*end.tokens, *[-1] * missing), (*end.logits, *[0.0] * missing)


def is_run(path: Path) -> bool:
    """Returns whether a file begins as a record. Raises OSError."""
    return _SEAL.begins(path)


def read_run(path: Path) -> Run:
    """Reads a run. Raises BadInputError for a file that is no record, is not whole, or was changed."""
    where = f"record {str(path)!r}"
    if not path.is_file():
        raise BadInputError(f"{where}: {no_file(path)}")
    try:
        if (why := _SEAL.refusal(path)) is not None:
            raise BadInputError(f"{where}: {why}")
        return _read(GGUFReader(path, "c"), where)
    except BadInputError:
        raise
    except OSError as error:
        raise BadInputError(f"{where}: {error.strerror or error}") from None
    except Exception as error:
        raise BadInputError(f"{where}: cannot be read: {type(error).__name__}: {error}") from None


def _read(reader: GGUFReader, where: str) -> Run:
    values = {name: found.contents() for name, found in reader.fields.items() if name.startswith("record.")}
    if values.get("record.format") != FORMAT:
        raise BadInputError(f"{where}: is of format {values.get('record.format')}; format {FORMAT} is read here")
    tensors = {each.name: np.asarray(each.data).view(np.uint8).reshape(-1) for each in reader.tensors}
    index = json.loads(zlib.decompress(tensors["index"].tobytes()))
    counts, ends = (np.frombuffer(zlib.decompress(tensors[name].tobytes()), type) for name, type in _COMPRESSED.items())
    rows = np.zeros(len(counts), ROW)
    rows.view(np.uint8).reshape(-1, ROW.itemsize)[:, :_NAN_AT] = tensors.get("rows", _NONE).reshape(-1, _NAN_AT)
    rows["nan"] = counts
    run = Run(About(**index["about"]), [*map(form_from, index["forms"])], state=index["state"])
    row = end = 0
    for each in index["steps"]:
        n, n_ends = int(each["rows"]), int(each["ends"])
        found = [*map(_end_from, ends[end : end + n_ends])]
        step = Step(each["tokens"], found, each["form"], tuple(each["sizes"]), rows[row : row + n])
        if len(step.rows) != n or (step.form is not None and len(run.forms[step.form].ne(step.sizes)) != n):
            raise ValueError(f"step {len(run.steps)} has not {n} rows")
        run.steps.append(step)
        row, end = row + n, end + n_ends
    run.data = {(step, place): tensors[f"data.{step}.{place}"] for step, place in index["data"]}
    run.logits = {step: tensors[f"logits.{step}"].view(np.float32).reshape(n, -1) for step, n, _ in index["logits"]}
    return run


def _end_from(end: Any) -> End:
    n = int((end["tokens"] >= 0).sum())
    return End(end["row"].reshape(1), tuple(end["tokens"][:n].tolist()), tuple(end["logits"][:n].tolist()))


def size_of(path: Path, run: Run) -> dict[str, Any]:
    """Returns how large a written run is, in tokens, steps, nodes in all steps, and bytes; and how many bytes a node
    and step takes without data; None if no node was looked at."""
    n_bytes = path.stat().st_size
    kept = sum(each.nbytes for each in run.data.values()) + sum(each.nbytes for each in run.logits.values())
    return {
        "tokens": run.n_tokens, "steps": len(run.steps), "nodes": run.n_rows, "bytes": n_bytes,
        "bytes_a_node": (n_bytes - kept) / run.n_rows if run.n_rows else None,
    }  # fmt: skip
