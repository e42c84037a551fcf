"""One layout of ggml's structs and tables of functions, as ctypes needs it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

_TYPES: dict[str, Any] = {
    "void": None,
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "pointer": ctypes.c_void_p,
    "size_t": ctypes.c_size_t,
    "sizes": ctypes.POINTER(ctypes.c_size_t),
    "text": ctypes.c_char_p,
    "uint8_t": ctypes.c_uint8,
    "uint64_t": ctypes.c_uint64,
}


@dataclass(frozen=True, eq=False)
class Layout:
    """The structs of a ggml that are not public. `layout["ggml_backend_device"]` is a struct or a table, by its C name.

    versions      of ggml that it was read from; empty for versions to come
    api_version   GGML_BACKEND_API_VERSION
    tables        the functions of each, in order: result(arguments)
    structs       the fields of each: offset, type
    enumerations  those whose numbers the backend uses
    """

    versions: tuple[str, ...]
    api_version: int
    tables: Mapping[str, Mapping[str, str]]
    structs: Mapping[str, Mapping[str, tuple[int, str]]]
    enumerations: Mapping[str, Mapping[str, int]]

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]

    def but(self, **parts: Any) -> Layout:
        """Another layout: other versions or API version, and the tables, structs and enumerations that differ."""
        own = vars(self)
        changed: dict[str, Any] = {k: own[k] | v if isinstance(v, dict) else v for k, v in parts.items()}
        return replace(self, **changed)

    def caps(self, **capabilities: bool) -> ctypes.Structure:
        """A ggml_backend_dev_caps with the given capabilities, less those that this ggml does not have."""
        known = self.structs["ggml_backend_dev_caps"]
        made: ctypes.Structure = self["ggml_backend_dev_caps"](**{k: v for k, v in capabilities.items() if k in known})
        return made

    @cached_property
    def _classes(self) -> dict[str, type[ctypes.Structure]]:
        made: dict[str, type[ctypes.Structure]] = {}

        def kind(name: str) -> Any:
            if name == "props":
                return ctypes.POINTER(structure("ggml_backend_dev_props"))
            if array := re.fullmatch(r"(\w+)\[(\d+)\]", name):
                return kind(array[1]) * int(array[2])
            return _TYPES[name] if name in _TYPES else structure(name)

        def function(signature: str) -> Any:
            result, _, arguments = signature.removesuffix(")").partition("(")
            # a text that a callback returns would be copied by ctypes, and never freed
            return ctypes.CFUNCTYPE(kind(result.replace("text", "pointer")), *map(kind, arguments.split(", ")))

        def structure(name: str) -> type[ctypes.Structure]:
            if name not in made:
                if name in self.tables:
                    fields = [(slot, function(signature)) for slot, signature in self.tables[name].items()]
                else:
                    fields = [(part, kind(type)) for part, (_, type) in self.structs[name].items()]
                made[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
            return made[name]

        for name in (*self.tables, *self.structs):
            structure(name)
        return made
