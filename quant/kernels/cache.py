"""Where compiled kernels are kept: in a folder that cannot go stale."""

from __future__ import annotations

import functools
from pathlib import Path

import xxhash

from quant import folders
from quant.kernels.processor import lanes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quant", "ggml_backend_npu")  # what a kernel is made of, and what it is compiled by


def cache_directory() -> Path:
    """The folder of compiled kernels: one for each content of the packages that kernels are made of, and for each value
    of `lanes`.

    A kernel is made of the functions that it calls, too; a folder named by all the sources cannot go stale.
    `NUMBA_CACHE_DIR`, if set, replaces the user's cache directory. Raises FolderError for a user without a home.
    """
    return folders.kernels_root() / f"kernels-{sources(*PACKAGES, salt=bytes([lanes()]))[:16]}"


@functools.cache
def sources(*packages: str, salt: bytes = b"", root: Path = ROOT) -> str:
    """A digest of all sources of packages of this project, which lie in a folder."""
    digest = xxhash.xxh3_128(salt)
    for source in sorted(path for name in packages for path in (root / name).rglob("*.py")):
        digest.update(f"{source.relative_to(root)}\0".encode(errors="surrogateescape"))
        digest.update(xxhash.xxh3_128_digest(source.read_bytes()))
    return digest.hexdigest()


def kept_in() -> Path:
    """`cache_directory`, made if it is missing. Raises FolderError if nothing can be kept in it."""
    return folders.kept(cache_directory())
