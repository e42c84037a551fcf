"""Block codecs and layouts of ggml's types: q8_0 and q4_0 fast and byte for byte, and every other type."""

from importlib.metadata import version

from quant import blocks, longtail, scalars  # noqa: F401  (codecs register themselves)
from quant.codec import ROUNDINGS, Codec, Rounding, codec, dequantize, quantize, type_names
from quant.layout import DeviceLayout, to_blocks, to_device

__version__ = version("ggml-backend-npu")

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
