"""Every command of ggml-npu, once, with files of its own: for what has to hold of all of them."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kit.quantised import write_pair

from graph_runner.tools.suites import TESTS, folder
from quant.kernels import kept
from quant.kernels.cache import cache_directory

KERNEL = """
from ggml_backend_npu import op

@op("CONT")
def cont(dst, x):
    dst.view()[...] = x.view().reshape(dst.ne[::-1])
"""

# of a Python whose user has no entry in passwd
HOMELESS = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"


class Row(NamedTuple):
    """A command.

    words    with files of `Files` in braces
    refused  words that a process without llama-cpp-python refuses; "" if it works there
    code     its exit code
    """

    words: str
    refused: str
    code: int = 0


COMMANDS = {
    "run": Row("run {model} -n 1 -f {prompt} --kernels {kernels} --profile {profile}", "run tiny"),
    "diff": Row(
        "diff {model} -n 0 -f {prompt} --kernels {kernels} --tolerances {tolerances} --ops CONT",
        "diff tiny --all",
    ),
    "matrix": Row("matrix {model} -o {cache}-matrix --settings {setting}", "matrix tiny -o matrix"),
    "capture": Row("capture {model} -n 0 -f {prompt} --nodes CONT -o {trace}", "capture tiny -o trace.gguf"),
    "replay": Row("replay {trace} --kernels {kernels} --tolerances {tolerances}", ""),
    "coverage": Row("coverage {model} -f {prompt} --kernels {kernels} --profile {profile}", "coverage tiny"),
    "bisect": Row("bisect {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile} --repeat 1", "bisect tiny"),
    "flaky": Row("flaky {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile} --repeat 2", "flaky tiny"),
    "quantdiff": Row("quantdiff {model} {small} -f {text} -c 16 --tensors 0", "quantdiff text text -f text"),
    "timeline": Row("timeline {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile}", "timeline tiny"),
    "hazards": Row("hazards {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile}", "hazards tiny"),
    "triage": Row("triage {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile}", "triage tiny"),
    "record": Row(
        "record {model} -n 0 -f {prompt} --device npu --kernels {kernels} --profile {profile} -o {record}",
        "record tiny -o record.gguf",
    ),
    "compare": Row("compare {record} {record}", ""),
    "devices": Row("devices --device-file {device}", "devices"),
    "doctor": Row("doctor {device}", ""),
    "plugin": Row("plugin", ""),
    "test": Row("test {kernels}", "test -o SQR", code=2),  # no program is built
    "ops": Row("ops --kernels {kernels}", ""),
    "cache": Row("cache", ""),
    "bench": Row("bench start --model {model} --rounds 1", "bench"),
}


@dataclass(frozen=True)
class Files:
    """Files of each kind that commands read, and a cache for what they build, in which ggml's programs are empty. Those
    that are run are in a folder of their own, which they may import from."""

    model: Path
    small: Path
    text: Path
    kernels: Path
    prompt: Path
    profile: Path
    tolerances: Path
    device: Path
    trace: Path
    record: Path
    cache: Path

    @classmethod
    def within(cls, folder: Path, mark: str = "") -> Files:
        """Writes them. Their names have a mark in them."""
        own = folder / f"{mark}own"
        own.mkdir(parents=True)
        paths = {name: folder / f"{mark}{name}" for name in ("prompt", "profile.toml", "tolerances.toml")}
        paths = {name.removesuffix(".toml"): path for name, path in paths.items()}
        paths |= {"kernels": own / f"copy{mark}.py", "device": own / f"device{mark}.py"}
        paths["kernels"].write_text(KERNEL)
        paths["prompt"].write_text("hello")
        paths["profile"].write_text('ops = ["CONT"]')
        paths["tolerances"].write_text('[MUL_MAT]\n"*" = 1e-6\n')
        paths["device"].write_text(
            "from ggml_backend_npu import register\n"
            "from ggml_backend_npu.device.sim import Simulator\n"
            "register(Simulator())\n"
        )
        paths["text"] = folder / f"{mark}text"
        paths["text"].write_text("hello " * 4)
        paths |= {name: folder / f"{mark}{name}.gguf" for name in ("trace", "record")}
        model, small = write_pair(folder, mark=mark)
        made = cls(model=model, small=small, cache=folder / f"{mark}cache", **paths)
        made._build_nothing()
        return made

    def _build_nothing(self) -> None:
        programs = self.cache / "ggml-npu" / folder().relative_to(folder().parents[1])
        programs.mkdir(parents=True, mode=0o700)
        for name in TESTS.names:
            (programs / name).write_text("#!/bin/sh\n")
            (programs / name).chmod(0o700)
        kept.seal(programs)

    def line(self, command: str) -> list[str]:
        """The words of a command."""
        return [word.format(**vars(self), setting=self._setting) for word in COMMANDS[command].words.split()]

    @property
    def _setting(self) -> str:
        """Options of a diff in one word of a command."""
        options = ("-n", "0", "-f", self.prompt, "--kernels", self.kernels, "--tolerances", self.tolerances)
        return shlex.join([*map(str, options), "--ops", "CONT"])

    @property
    def environment(self) -> dict[str, str]:
        """Variables with this cache, and with the kernels that are compiled already."""
        return os.environ | {"XDG_CACHE_HOME": str(self.cache), "NUMBA_CACHE_DIR": str(cache_directory().parent)}
