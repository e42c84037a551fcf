"""A recorded run as a GGUF file."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from ggml_backend_npu.user_texts import no_file
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import replacing
from graph_runner.base.sealed import Seal
from graph_runner.record.forms import form_from, form_json
from graph_runner.record.measures import ROW
from graph_runner.record.run import About, End, Run, Step

FORMAT = 1
_SEAL = Seal("record")


def write_run(path: Path, run: Run) -> None:
    """Writes a run, whole or not at all. Raises BadInputError for a file that cannot be written."""
    index = {
        "state": run.state,
        "forms": [form_json(form) for form in run.forms],
        "steps": [
            {
                "tokens": step.tokens, "form": step.form, "sizes": step.sizes, "rows": len(step.rows),
                "ends": [[each.tokens, each.logits] for each in step.ends],
            }
            for step in run.steps
        ],
        "data": [*run.data],
        "logits": [[step, *logits.shape] for step, logits in run.logits.items()],
    }  # fmt: skip
    tensors = {
        "index": np.frombuffer(zlib.compress(json.dumps(index, separators=(",", ":")).encode()), np.int8),
        "rows": np.concatenate([np.zeros(0, ROW), *(step.rows for step in run.steps)]).view(np.int8),
        "ends": np.concatenate([np.zeros(0, ROW), *(end.row for step in run.steps for end in step.ends)]).view(np.int8),
    }
    tensors |= {f"data.{step}.{place}": data.view(np.int8) for (step, place), data in run.data.items()}
    tensors |= {f"logits.{step}": logits.reshape(-1).view(np.int8) for step, logits in run.logits.items()}
    try:
        with replacing(path) as partial:
            writer = _SEAL.writer(partial)
            writer.add_uint32("record.format", FORMAT)
            writer.add_string("record.about", json.dumps(asdict(run.about)))
            for name, data in tensors.items():
                if data.size:
                    writer.add_tensor(name, data)
            _SEAL.finish(writer, partial)
    except OSError as error:
        raise BadInputError(f"record {str(path)!r}: {error.strerror or error}") from None


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
    rows, ends = (tensors.get(name, np.zeros(0, np.uint8)).view(ROW) for name in ("rows", "ends"))
    run = Run(About(**json.loads(values["record.about"])), [*map(form_from, index["forms"])], state=index["state"])
    row = end = 0
    for each in index["steps"]:
        n = int(each["rows"])
        found = [
            End(ends[end + i : end + i + 1], tuple(tokens), tuple(logits))
            for i, (tokens, logits) in enumerate(each["ends"])
        ]
        step = Step(each["tokens"], found, each["form"], tuple(each["sizes"]), rows[row : row + n])
        if len(step.rows) != n or (step.form is not None and len(run.forms[step.form].ne(step.sizes)) != n):
            raise ValueError(f"step {len(run.steps)} has not {n} rows")
        run.steps.append(step)
        row, end = row + n, end + len(found)
    run.data = {(step, place): tensors[f"data.{step}.{place}"] for step, place in index["data"]}
    run.logits = {step: tensors[f"logits.{step}"].view(np.float32).reshape(n, -1) for step, n, _ in index["logits"]}
    return run


def size_of(path: Path, run: Run) -> dict[str, Any]:
    """Returns how large a written run is, in tokens, steps, nodes in all steps, and bytes; and how many bytes a node
    and step takes without data; None if no node was looked at."""
    n_bytes = path.stat().st_size
    kept = sum(each.nbytes for each in run.data.values()) + sum(each.nbytes for each in run.logits.values())
    return {
        "tokens": run.n_tokens, "steps": len(run.steps), "nodes": run.n_rows, "bytes": n_bytes,
        "bytes_a_node": (n_bytes - kept) / run.n_rows if run.n_rows else None,
    }  # fmt: skip
