"""GGUF files that carry a SHA-256 of their own: one that is cut off or was changed is seen before it is used."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFWriter

NO_DIGEST = b"0" * 64
_HEADER_BYTES = 24


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@dataclass(frozen=True)
class Seal:
    """A kind of such files. They begin with a GGUF's header and two keys: the architecture and the digest, which is
    that of the file with zeros in its place.

    name  of the kind: "trace"; its architecture is "ggml-npu-trace", the key of its digest "trace.sha256"
    """

    name: str

    @property
    def _prefix(self) -> bytes:
        architecture = _string("general.architecture") + struct.pack("<I", 8) + _string(f"ggml-npu-{self.name}")
        return architecture + _string(f"{self.name}.sha256") + struct.pack("<I", 8) + struct.pack("<Q", len(NO_DIGEST))

    @property
    def digest_at(self) -> int:
        """Where in a file the digest is."""
        return _HEADER_BYTES + len(self._prefix)

    def writer(self, path: Path) -> GGUFWriter:
        """Returns a writer of a file that is to be sealed; what it is given comes after the digest."""
        writer = GGUFWriter(path, f"ggml-npu-{self.name}", use_temp_file=True)
        writer.add_string(f"{self.name}.sha256", NO_DIGEST.decode())
        return writer

    def finish(self, writer: GGUFWriter, path: Path) -> None:
        """Writes what a writer was given, with the digest. Raises OSError."""
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        digest = self.digest(path)
        with path.open("r+b") as file:
            file.seek(self.digest_at)
            file.write(digest)

    def digest(self, path: Path) -> bytes:
        """Returns the SHA-256 of a file, computed with zeros in place of the digest, as 64 hexadecimal digits."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            digest.update(file.read(self.digest_at) + NO_DIGEST)
            file.seek(len(NO_DIGEST), os.SEEK_CUR)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest().encode()

    def begins(self, path: Path) -> bool:
        """Whether a file begins as one of this kind. Raises OSError."""
        with path.open("rb") as file:
            head = file.read(self.digest_at)
        return head[:4] == b"GGUF" and head[_HEADER_BYTES:] == self._prefix

    def refusal(self, path: Path) -> str | None:
        """Returns why a file is none of this kind, or none that is whole; None if it is. Raises OSError."""
        with path.open("rb") as file:
            head = file.read(self.digest_at + len(NO_DIGEST))
        if head[:4] != b"GGUF":
            return f"not a GGUF file (begins with {head[:4]!r})"
        if head[_HEADER_BYTES : self.digest_at] != self._prefix[: max(0, len(head) - _HEADER_BYTES)]:
            return f"a GGUF file, but no {self.name}"
        if head[self.digest_at :] != self.digest(path):
            return "is cut off or was changed: its SHA-256 is another one"
        return None
