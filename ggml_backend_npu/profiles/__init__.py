"""Device generations: which nodes each takes. `load` finds one by its name or its file."""

from __future__ import annotations

from pathlib import Path

from ggml_backend_npu.profiles.files import read
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import Profile, ProfileError


def load(name: str) -> Profile:
    """The profile with a name, or that of a TOML file. Raises ProfileError if there is none, or if the file is not a
    profile."""
    if name in PROFILES:
        return PROFILES[name]
    if not name.endswith(".toml"):
        raise ProfileError(f"must be one of {', '.join(PROFILES)}, or FILE.toml")
    return read(Path(name))
