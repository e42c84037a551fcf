"""Examines one ggml in a process of its own: python -m ggml_backend_npu.ggml.doctor PACKAGE-OR-LIBRARY

Prints a JSON object: `version`, `layout` (the versions that share it), `library`, `known`, `devices`; or `refused`, the
reason.
"""

from __future__ import annotations

import json
import sys

from ggml_backend_npu.ggml import lib, places
from quant.errors import UserError


def examine(where: str) -> dict[str, object]:
    """The JSON object for the ggml of a package or of a library; `refused` says why the device cannot go in."""
    found: dict[str, object] = {}
    try:
        ggml = lib.Ggml(places.library_of(where))
        found = {"version": ggml.version, "library": str(ggml.cpu_file)}
        found["layout"] = list(ggml.layout.versions) or [f"API {ggml.layout.api_version}"]
        found["known"] = ggml.is_between
        found["devices"] = [device.name for device in lib.list_devices(ggml)]
    except UserError as error:
        found["refused"] = str(error)
    return found


def main() -> None:
    """Examines what the command line names."""
    print(json.dumps(examine(sys.argv[1])))


if __name__ == "__main__":
    main()
