"""Every command of ggml-npu, once, with files of its own: for what has to hold of all of them."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

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

# the words of each command, in a folder of `files`; and its exit code
COMMANDS: dict[str, tuple[str, int]] = {
    "run": ("run {model} -n 1 -f {prompt} --kernels {kernels} --profile {profile}", 0),
    "diff": ("diff {model} -n 0 -f {prompt} --kernels {kernels} --tolerances {tolerances} --ops CONT", 0),
    "matrix": ("matrix {model} -o {cache}-matrix --settings {setting}", 0),
    "capture": ("capture {model} -n 0 -f {prompt} --nodes CONT -o {trace}", 0),
    "replay": ("replay {trace} --kernels {kernels} --tolerances {tolerances}", 0),
    "coverage": ("coverage {model} -f {prompt} --kernels {kernels} --profile {profile}", 0),
    "bisect": ("bisect {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile} --repeat 1", 0),
    "flaky": ("flaky {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile} --repeat 2", 0),
    "quantdiff": ("quantdiff {model} {small} -f {text} -c 16 --tensors 0", 0),
    "timeline": ("timeline {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile}", 0),
    "hazards": ("hazards {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile}", 0),
    "triage": ("triage {model} -n 0 -f {prompt} --kernels {kernels} --profile {profile}", 0),
    "record": ("record {model} -n 0 -f {prompt} --device npu --kernels {kernels} --profile {profile} -o {record}", 0),
    "compare": ("compare {record} {record}", 0),
    "devices": ("devices --device-file {device}", 0),
    "doctor": ("doctor {device}", 0),
    "plugin": ("plugin", 0),
    "test": ("test {kernels}", 2),  # no program is built
    "ops": ("ops --kernels {kernels}", 0),
    "cache": ("cache", 0),
    "bench": ("bench start --model {model} --rounds 1", 0),
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
        return [word.format(**vars(self), setting=self._setting) for word in COMMANDS[command][0].split()]

    @property
    def _setting(self) -> str:
        """Options of a diff in one word of a command."""
        options = ("-n", "0", "-f", self.prompt, "--kernels", self.kernels, "--tolerances", self.tolerances)
        return shlex.join([*map(str, options), "--ops", "CONT"])

    @property
    def environment(self) -> dict[str, str]:
        """Variables with this cache, and with the kernels that are compiled already."""
        return os.environ | {"XDG_CACHE_HOME": str(self.cache), "NUMBA_CACHE_DIR": str(cache_directory().parent)}
