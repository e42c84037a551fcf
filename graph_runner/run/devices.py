"""Devices of ggml by their names: those that it has by itself, and those of backend libraries and RPC servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin import foreign
from ggml_backend_npu.plugin.foreign import ForeignDevice
from graph_runner.base.errors import BadInputError

_OURS = ("CPU", "NPU")


@dataclass(frozen=True)
class Devices:
    """Where devices are looked for, besides those that ggml has by itself.

    libraries  of backends: libggml-blas.so
    servers    "HOST:PORT" of ggml-rpc-server; among the libraries must be libggml-rpc.so
    """

    libraries: tuple[Path, ...] = ()
    servers: tuple[str, ...] = ()

    def named(self, ggml: Ggml, name: str) -> ForeignDevice:
        """Returns the device of a name, as ggml writes it, in any case; of several with commas between them, those that
        share a model's layers. Raises BadInputError if there is none, and ForeignError for a library or a server that
        cannot be used, or a device that cannot share."""
        names = name.split(",")
        ours = next((each for each in names if each.upper() in _OURS), None)
        if ours is not None and len(names) > 1:
            raise BadInputError(f"device {name!r}: {ours} shares no layers of a model with another")
        first, *others = [self._named(ggml, each) for each in names]
        return first.together(others)

    def _named(self, ggml: Ggml, name: str) -> ForeignDevice:
        found = []
        for each in self._each(ggml):
            if each.info.backend not in _OURS:
                found.append(each)
                if each.name.upper() == name.upper():
                    return each  # servers that come after it are not asked: they may be gone
        known = " ".join([*_OURS, *(each.name for each in found)])
        raise BadInputError(f"device {name!r}: there is none of this name; there are: {known}")

    def all(self, ggml: Ggml) -> list[ForeignDevice]:
        """Returns every device. Raises BadInputError and ForeignError."""
        return [*self._each(ggml)]

    def _each(self, ggml: Ggml) -> Iterator[ForeignDevice]:
        rpc = next((each for each in self.libraries if each.name.startswith("libggml-rpc")), None)
        if self.servers and rpc is None:
            raise BadInputError(f"--rpc {self.servers[0]!r}: needs --backend libggml-rpc.so")
        yield from foreign.of_ggml(ggml)
        for path in self.libraries:
            if path != rpc or not self.servers:
                yield from foreign.of_library(ggml, path)
        for endpoint in self.servers:
            assert rpc is not None
            yield from foreign.of_server(ggml, endpoint, rpc)

    def described(self, name: str) -> dict[str, str]:
        """Returns how a trace and a report name a device of these: what the options of a command were."""
        texts = {"device": name, "backend": ", ".join(map(str, self.libraries)), "rpc": ", ".join(self.servers)}
        return {} if name in _OURS else {option: text for option, text in texts.items() if text}
