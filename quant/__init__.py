"""Block codecs and layouts of ggml's types: q8_0 and q4_0 fast and byte for byte, and every other type."""

from quant import blocks, longtail, scalars  # noqa: F401  (codecs register themselves)
from quant.codec import ROUNDINGS, Codec, Rounding, codec, dequantize, quantize, type_names
from quant.layout import DeviceLayout, to_blocks, to_device

__all__ = [
    "ROUNDINGS",
    "Codec",
    "DeviceLayout",
    "Rounding",
    "codec",
    "dequantize",
    "quantize",
    "to_blocks",
    "to_device",
    "type_names",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # late, as it is slow

    return version("ggml-backend-npu")
