"""A ggml type as a codec: its block size, the bytes of a block, and how values become blocks and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from quant.kernels.memory import empty

if TYPE_CHECKING:
    from quant.conversions import Run

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Rounding = Literal["reference", "simd", "neon"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
_CHUNK = 1 << 15  # elements converted at a time, if a codec needs temporaries


class Codec:
    """One ggml type. A subclass registers itself by its class statement; `codec(name)` gives its instance.

    name         ggml_type_name() of the type
    block_size   elements in a block (ggml_blck_size)
    block_bytes  bytes of a block (ggml_type_size)
    provider     who computes it: "ours", "ggml" or "gguf" (gguf.quants)
    is_compiled  whether it takes any number of blocks at once, without temporaries
    run          what compiled conversions of the type are made from; None: it has none
    """

    name: str
    block_size: int = 1
    block_bytes: int
    provider: str = "ours"
    is_compiled: bool = False
    run: Run | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" in cls.__dict__:
            _CODECS[cls.name] = cls()

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy type of one element, for types whose block is one element."""
        return None

    @property
    def is_quantized(self) -> bool:
        """Whether the type has blocks of several elements, which have no NumPy type."""
        return self.block_size > 1

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """float32 (n_blocks, block_size) -> uint8 (n_blocks, block_bytes). Raises NotImplementedError if a type has
        no encoder."""
        raise NotImplementedError(f"type {self.name}: no encoder")

    def decode(self, blocks: Bytes) -> Floats:
        """uint8 (n_blocks, block_bytes) -> float32 (n_blocks, block_size). Raises NotImplementedError if a type has
        no decoder."""
        raise NotImplementedError(f"type {self.name}: no decoder")


_CODECS: dict[str, Codec] = {}


def codec(name: str) -> Codec:
    """The codec of the ggml type `name` ("q8_0", "f16", "q4_K", ...; case does not matter).

    Raises ValueError for an unknown name, with the known ones in its message, and TypeError for anything that is not a
    string.
    """
    if not isinstance(name, str):
        raise TypeError(f"type {name!r}: must be the name of a ggml type, such as 'q8_0'")
    found = _CODECS.get(name) or next((c for n, c in _CODECS.items() if n.lower() == name.lower()), None)
    if found is None:
        raise ValueError(f"unknown type {name!r}; known: {' '.join(type_names())}")
    return found


def type_names() -> list[str]:
    """The names of all types, in the order in which they were registered."""
    return list(_CODECS)


def plain_array(name: str, value: object) -> NDArray[Any]:
    """Checks an argument that has to be an array of numbers, and returns it as a plain array.

    Raises TypeError for anything that is not an array, and ValueError for a masked array, whose mask would be lost, and
    for complex numbers and other dtypes. Both name the argument.
    """
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{name} of type {type_of(value)}: must be a NumPy array")
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{name}: a masked array, whose mask would be lost; {name}.filled(...) has none")
    if value.dtype.kind not in "biufV":
        raise ValueError(f"{name} of dtype {value.dtype}: must be real numbers or bytes")
    return np.asarray(value)


def type_of(value: object) -> str:
    """The name of a value's Python type."""
    return type(value).__name__


def quantize(x: NDArray[Any], type: str, rounding: Rounding = "reference") -> Bytes:
    """Values -> blocks of a ggml type.

    x         (..., n) of any float or integer type, taken as float32; n is a multiple of the type's block size. An
              array of the type's own `Codec.dtype` is copied as it is (uint16 is taken as the bits of bf16)
    type      name of a ggml type
    rounding  q8_0 and q8_1 have three: "reference" (as ggml_quantize_chunk, which model files are made with, and
              quantize_row_q8_1_ref), "simd" and "neon" (as ggml's CPU backend, which runs inside a graph, on x86 and on
              ARM); iq4_nl has two, in a file and in a graph; f16 has two for NaNs, whose payload "simd" alone keeps

    Returns uint8 (..., n / block_size * block_bytes). Raises ValueError for an unknown type or rounding, for an n that
    is not a multiple of the block size, for masked and complex arrays, and for a value of iq1, iq2 or iq3 that is not
    finite or too large for ggml's own C (2 ** 30; iq2_s and iq3: 2 ** 39); TypeError for anything that is not an array
    of numbers; UserError for a type that takes a ggml to encode, if there is none (`quant.longtail`).
    """
    kind = codec(type)
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; known: {' '.join(ROUNDINGS)}")
    x = plain_array("x", np.asarray(x) if isinstance(x, list | tuple | np.generic) else x)
    if x.ndim == 0 or x.shape[-1] % kind.block_size:
        raise ValueError(
            f"x of shape {x.shape}: last axis must be a multiple of {kind.name}'s block size {kind.block_size}"
        )
    shape = (*x.shape[:-1], x.shape[-1] // kind.block_size * kind.block_bytes)
    if kind.dtype is not None and x.dtype == kind.dtype:
        return np.ascontiguousarray(x).view(np.uint8).reshape(shape)
    n_blocks = x.size // kind.block_size
    if kind.is_compiled and x.dtype == np.float32 and x.flags.c_contiguous:
        return kind.encode(x.reshape(n_blocks, kind.block_size), rounding).reshape(shape)
    blocks = empty((n_blocks, kind.block_bytes), np.uint8)
    elements = x.reshape(-1) if x.flags.c_contiguous else x.flat
    for begin, end in _chunks(kind, n_blocks):
        part = np.ascontiguousarray(elements[begin * kind.block_size : end * kind.block_size], dtype=np.float32)
        blocks[begin:end] = kind.encode(part.reshape(-1, kind.block_size), rounding).reshape(-1, kind.block_bytes)
    return blocks.reshape(shape)


def _chunks(kind: Codec, n_blocks: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of a few blocks each, so that no temporary grows with the array."""
    step = max(1, _CHUNK // kind.block_size)
    for begin in range(0, n_blocks, step):
        yield begin, min(begin + step, n_blocks)


def dequantize(blocks: NDArray[Any], type: str) -> Floats:
    """Blocks of a ggml type -> values.

    blocks  (..., m) bytes; m is a multiple of the type's block bytes (an array of another dtype is taken as its bytes)
    type    name of a ggml type

    Returns float32 (..., m / block_bytes * block_size), equal to ggml's to_float. Raises ValueError for an unknown
    type, for an m that is not a multiple of the block bytes, and for masked and complex arrays; TypeError for anything
    that is not an array: the numbers of a list have no size in bytes, and np.frombuffer(data, np.uint8) makes an array
    of bytes; UserError for q1_0 if there is no ggml.
    """
    kind = codec(type)
    blocks = plain_array("blocks", blocks)
    if blocks.ndim == 0:
        raise ValueError(f"blocks of shape {np.shape(blocks)}: must have at least one axis")
    data = np.ascontiguousarray(blocks).view(np.uint8)
    if data.shape[-1] % kind.block_bytes:
        raise ValueError(
            f"blocks of {data.shape[-1]} bytes a row: must be a multiple of {kind.name}'s {kind.block_bytes}"
        )
    rows = data.reshape(-1, kind.block_bytes)
    shape = (*data.shape[:-1], data.shape[-1] // kind.block_bytes * kind.block_size)
    if kind.is_compiled:
        return kind.decode(rows).reshape(shape)
    values = empty((len(rows), kind.block_size), np.float32)
    for begin, end in _chunks(kind, len(rows)):
        values[begin:end] = kind.decode(rows[begin:end]).reshape(-1, kind.block_size)
    return values.reshape(shape)
