"""Settings that one side of a diff has and the other side need not have: "threads=2", "repack=on"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from graph_runner.base.builds import Build, short
from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_THREADS
from graph_runner.base.settings import Settings
from quant.kernels.processor import announces_amx

_OFF_AND_ON = {"off": False, "on": True}
_OF: dict[str, tuple[str, ...]] = {
    "CPU": ("threads", "flash-attn", "repack", "build", "python"),
    "NPU": ("matmul", "kernels"),
}
_OF_OTHERS = ("op-offload",)


def _number(most: int, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise ValueError(f"must be 1 to {most}")
    return int(text)


def _choice(choices: Mapping[str, Any], text: str) -> Any:
    if text not in choices:
        raise ValueError(f"must be {' or '.join(choices)}")
    return choices[text]


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {  # of Settings
    "threads": ("threads", partial(_number, MOST_THREADS)),
    "flash-attn": ("flash_attention", partial(_choice, {"off": "off", "on": "on"})),
    "repack": ("repack", partial(_choice, _OFF_AND_ON)),
    "op-offload": ("op_offload", partial(_choice, _OFF_AND_ON)),
}
_CHECKS: dict[str, Callable[[str], Any]] = {name: check for name, (_, check) in _FIELDS.items()} | {
    "matmul": partial(_choice, {"exact": "exact", "fast": "fast"}),
    "kernels": str,
    "build": Build.of_folder,
    "python": Build.of_python,
}
_BUILDS = ("build", "python")


@dataclass(frozen=True)
class Variant:
    """The settings of a side, as texts by name.

    threads     of ggml's CPU
    flash-attn  off, on
    repack      whether ggml's CPU has weights in an order of its own: off, on
    op-offload  whether a device that is given some layers computes large nodes of the others too: off, on
    matmul      of this project's kernels: exact, fast
    kernels     a user's file of kernels
    build       a folder of another llama.cpp
    python      a Python whose environment has another llama-cpp-python

    build of a variant is that llama.cpp; None: the command's own
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    build: Build | None = None

    @classmethod
    def of(cls, words: Sequence[str], device: str, option: str) -> Variant:
        """Returns the settings of a device. Raises BadInputError for words that are no NAME=VALUE, names that are none
        of a device's settings, and wrong values.

        words   "threads=2"
        device  "CPU", "NPU", or a device of ggml's
        option  that the words were given to
        """
        texts: dict[str, str] = {}
        build = None
        known = _OF.get(device, _OF_OTHERS)
        for word in words:
            name, equals, text = word.partition("=")
            if not equals or name not in known:
                raise BadInputError(f"{option} {word!r}: must be NAME=VALUE; {device} has: {' '.join(known)}")
            if name in texts:
                raise BadInputError(f"{option} {word!r}: {name} is given twice")
            try:
                checked = _CHECKS[name](text)
            except ValueError as error:
                raise BadInputError(f"{option} {word!r}: {error}") from None
            if name in _BUILDS and build is not None:
                raise BadInputError(f"{option} {word!r}: another build is given")
            build = checked if name in _BUILDS else build
            texts[name] = text
        if texts.get("repack") == "on" and announces_amx():
            raise BadInputError(f"{option} 'repack=on': this processor announces AMX, with which repacking may crash")
        return cls(texts, build)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def named(self, device: str) -> str:
        """Returns the name of a device with these settings: "CPU threads=2"."""
        texts = {name: short(text) if name in _BUILDS else text for name, text in self.texts.items()}
        return " ".join([device, *(f"{name}={text}" for name, text in texts.items())])

    def over(self, settings: Settings) -> Settings:
        """Returns a session's settings with these in place of its own."""
        given = {name: check(self.texts[of]) for of, (name, check) in _FIELDS.items() if of in self.texts}
        return replace(settings, **given)

    @property
    def options(self) -> dict[str, str | None]:
        """Options of the NPU by field name."""
        return {name: text for name, text in self.texts.items() if name == "matmul"}

    @property
    def kernels(self) -> tuple[Path, ...]:
        """A user's files of kernels."""
        return (Path(self.texts["kernels"]),) if "kernels" in self.texts else ()


@dataclass(frozen=True)
class Variants:
    """The settings of both sides of a diff. Truthy if one has any.

    own  the llama.cpp that the command has by itself
    """

    reference: Variant = field(default_factory=Variant)
    device: Variant = field(default_factory=Variant)
    own: Build = field(default_factory=Build.of_this_process)

    @classmethod
    def of(cls, reference: tuple[str, Sequence[str]], device: tuple[str, Sequence[str]]) -> Variants:
        """Returns the settings of two sides, each given by its device and words. Raises BadInputError as `Variant.of`
        does, and for settings that two such sides cannot be compared with."""
        options, names = ("--reference-with", "--device-with"), (reference[0], device[0])
        found = cls(Variant.of(reference[1], names[0], options[0]), Variant.of(device[1], names[1], options[1]))
        if found.reference.texts.get("repack") == "on":
            raise BadInputError(
                f"{options[0]} 'repack=on': repacked weights cannot be read; a reference has plain ones"
            )
        if found.device and names[1] == "CPU" != names[0]:
            raise BadInputError(f"{options[1]} {_first(found.device)!r}: --device CPU needs --reference CPU")
        for option, each in zip(options, (found.reference, found.device), strict=True):
            if "flash-attn" in each.texts and names != ("CPU", "CPU"):
                why = "changes the graph, which only --reference CPU and --device CPU may"
                raise BadInputError(f"{option} 'flash-attn={each.texts['flash-attn']}': {why}")
        return found

    def __bool__(self) -> bool:
        return bool(self.reference or self.device)

    @property
    def elsewhere(self) -> Build | None:
        """The llama.cpp of the device, if that is ggml's CPU and has not the reference's."""
        return (self.device.build or self.own) if self.device.build or self.reference.build else None

    def has(self, name: str) -> bool:
        """Whether a side has a setting of this name."""
        return name in self.reference.texts or name in self.device.texts


def _first(variant: Variant) -> str:
    return "=".join(next(iter(variant.texts.items())))
