"""XLA as a device of ggml: a whole split of a graph becomes one jitted function, compiled once for each topology."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before jax is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ggml_backend_npu import Device, DeviceError, Graph, Node, Program, Tensor
from ggml_backend_npu.ops import OWN

Array = Any
FLOATS, WEIGHTS, IDS = ("f32", "f16"), ("f32", "f16", "q8_0", "q4_0", "q4_1"), ("i32", "i64")
_DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "i32": jnp.int32}
_NORMAL, _NEOX = 0, 2
_INT8_MOST = np.float32(127)  # an argument: to divide by a constant, XLA multiplies with its rounded inverse


class Handle:
    """Memory of the device: an array of bytes, replaced by each program that writes to it."""

    def __init__(self, size: int) -> None:
        self.array: Array = jnp.zeros(size, jnp.uint8)


@partial(jax.jit, donate_argnums=0)
def _put(array: Array, data: Array, offset: Array) -> Array:
    return lax.dynamic_update_slice(array, data, (offset,))


@partial(jax.jit, static_argnums=2)
def _get(array: Array, offset: Array, size: int) -> Array:
    return lax.dynamic_slice(array, (offset,), (size,))


class XLA(Device):
    """JAX's first device: a TPU or GPU if there is one, else the CPU."""

    name, type, constants = "XLA0", "gpu", False
    largest = (1 << 31) - 1  # XLA's indices are int32

    def open(self) -> None:
        """Finds the device. Raises DeviceError if JAX has none."""
        try:
            chip = jax.devices()[0]
        except RuntimeError as error:
            raise DeviceError(f"JAX has no device: {error}") from None
        self._is_host = chip.platform == "cpu"
        self.description = f"{chip.platform} by XLA, jax {jax.__version__}"

    def alloc(self, size: int) -> Handle:
        """Allocates `size` bytes, set to 0."""
        return Handle(size)

    def copy_in(self, handle: Handle, offset: int, data: Any) -> None:
        """Copies bytes from the host."""
        handle.array = _put(handle.array, np.array(data), np.int32(offset))

    def copy_out(self, handle: Handle, offset: int, out: Any) -> None:
        """Copies bytes to the host; waits for the programs that write them."""
        if self._is_host:  # read where it lies: XLA would compile a slice for each size
            out[:] = np.asarray(handle.array)[offset : offset + out.size]
        else:
            out[:] = np.asarray(_get(handle.array, np.int32(offset), out.size))

    def fill(self, handle: Handle, offset: int, size: int, value: int) -> None:
        """Sets `size` bytes to one value."""
        handle.array = _put(handle.array, jnp.full(size, value, jnp.uint8), np.int32(offset))

    def synchronize(self) -> None:
        """Does nothing: a copy to the host waits by itself."""

    def refusal(self, node: Node) -> str | None:
        """Returns why the device does not take a node, None if it does."""
        taken, optional = _TYPES[node.op]
        if len(node.src) >= len(taken):
            return f"{len(node.src)} sources"
        for index, (tensor, types) in enumerate(zip((node.dst, *node.src), taken, strict=False)):
            if tensor is None and index not in optional:
                return f"source {index - 1} is left out"
            if tensor is not None and tensor.type not in types:
                return f"type {tensor.type}"
        return _refusal_of_params(node)

    def compile(self, graph: Graph) -> Program:
        """Returns the program of a graph, jitted once for each assignment of its tensors to buffers."""
        traced = _Traced(graph)
        written = frozenset(graph.root_of(each) for tensors in graph.beyond for each in tensors if each.nbytes)
        jitted: dict[tuple[int, ...], Callable[..., list[Array]]] = {}

        def run(places: Sequence[tuple[Handle, int]]) -> None:
            handles = list(dict.fromkeys(handle for handle, _ in places))
            which = tuple(handles.index(handle) for handle, _ in places)
            changed = sorted({which[root] for root in written})
            if which not in jitted:
                jitted[which] = jax.jit(partial(traced, which, changed), donate_argnums=0)
            kept = [None if at in changed else handle.array for at, handle in enumerate(handles)]
            offsets = np.array([offset for _, offset in places], np.int32)
            for at, array in zip(
                changed, jitted[which]([handles[at].array for at in changed], kept, offsets, _INT8_MOST), strict=True
            ):
                handles[at].array = array

        return run


class _Traced:
    """A graph as a function of the bytes of its buffers. During tracing, `values` holds the content of each root: its
    type and all its elements."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __call__(
        self,
        which: tuple[int, ...],
        changed: list[int],
        donated: list[Array],
        kept: list[Array],
        offsets: Array,
        int8_most: Array,
    ) -> list[Array]:
        self.int8_most = int8_most
        buffers = list(kept)
        for at, array in zip(changed, donated, strict=True):
            buffers[at] = array
        self.values: dict[int, tuple[Any, Array]] = {}
        self.load = lambda root: lax.dynamic_slice(
            buffers[which[root]], (offsets[root],), (self.graph.roots[root].memory.size,)
        )
        order: dict[int, None] = {}
        for node, beyond in zip(self.graph.nodes, self.graph.beyond, strict=True):
            self.write(node.dst, _KERNELS[node.op](self, node))
            if beyond:
                order.pop(self.graph.root_of(node.dst), None)
                order[self.graph.root_of(node.dst)] = None
        for root in order:
            content = self.elements(root, jnp.uint8)
            buffers[which[root]] = lax.dynamic_update_slice(buffers[which[root]], content, (offsets[root],))
        return [buffers[at] for at in changed]

    def elements(self, root: int, dtype: Any) -> Array:
        """Returns all elements of a root, as a vector of a type."""
        if root not in self.values:
            self.values[root] = jnp.uint8, self.load(root)
        known, flat = self.values[root]
        if known == dtype:
            return flat
        if known != jnp.uint8:
            flat = lax.bitcast_convert_type(flat, jnp.uint8).reshape(-1)
        if dtype == jnp.uint8:
            return flat
        size = jnp.dtype(dtype).itemsize
        return lax.bitcast_convert_type(flat[: len(flat) // size * size].reshape(-1, size), dtype)

    def read(self, tensor: Tensor | None) -> Array:
        """Returns a tensor's elements, (ne3, ne2, ne1, ne0); those of a quantised tensor as float32."""
        assert tensor is not None
        root, shape = self.graph.root_of(tensor), tensor.ne[::-1]
        if tensor.codec.dtype is None:
            return _DECODERS[tensor.type](self.blocks(tensor)).reshape(shape)
        if tensor.type == "i64":  # the low word
            return self._strided(root, tensor, jnp.int32, shape, tensor.nb[::-1])
        return self._strided(root, tensor, _DTYPES[tensor.type], shape, tensor.nb[::-1])

    def blocks(self, tensor: Tensor) -> Array:
        """Returns a quantised tensor's bytes, (ne3, ne2, ne1, blocks in a row, block bytes)."""
        shape = (*tensor.ne[:0:-1], tensor.n_blocks, tensor.codec.block_bytes)
        return self._strided(self.graph.root_of(tensor), tensor, jnp.uint8, shape, (*tensor.nb[::-1], 1))

    def _strided(
        self, root: int, tensor: Tensor, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Array:
        flat = self.elements(root, dtype)
        size = jnp.dtype(dtype).itemsize
        if tensor.is_contiguous() and tensor.codec.block_bytes in (size, tensor.nbytes // prod(shape) * size):
            begin = tensor.offset // size
            return flat[begin : begin + prod(shape)].reshape(shape)
        return flat[_places(tensor.offset, shape, strides, size)]

    def write(self, tensor: Tensor, value: Array) -> None:
        """Sets a tensor's elements."""
        root, dtype = self.graph.root_of(tensor), _DTYPES[tensor.type]
        value = value.astype(dtype)
        if tensor.is_contiguous() and tensor.nbytes == self.graph.roots[root].memory.size:
            self.values[root] = dtype, value.reshape(-1)
            return
        places = _places(tensor.offset, tensor.ne[::-1], tensor.nb[::-1], jnp.dtype(dtype).itemsize)
        self.values[root] = dtype, self.elements(root, dtype).at[places].set(value.reshape(places.shape))


def _places(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> Any:
    """Returns the index of each element."""
    axes = np.ogrid[tuple(slice(n) for n in shape)]
    return ((offset + sum(axis * stride for axis, stride in zip(axes, strides, strict=True))) // size).astype(np.int32)


# types


def _half(blocks: Array, at: int) -> Array:
    return lax.bitcast_convert_type(blocks[..., at : at + 2], jnp.float16).astype(jnp.float32)[..., None]


def _nibbles(blocks: Array, at: int) -> Array:
    q = blocks[..., at:]
    return jnp.concatenate([q & 15, q >> 4], -1).astype(jnp.float32)


_DECODERS: dict[str, Callable[[Array], Array]] = {
    "q8_0": lambda b: _half(b, 0) * lax.bitcast_convert_type(b[..., 2:], jnp.int8).astype(jnp.float32),
    "q4_0": lambda b: _half(b, 0) * (_nibbles(b, 2) - 8),
    "q4_1": lambda b: _half(b, 0) * _nibbles(b, 4) + _half(b, 2),
}


def _rounded(x: Array, type: str, int8_most: Array) -> tuple[Array, Array]:
    """Returns columns rounded as on ggml's CPU for weights of this type: to float16, or to blocks of int8; and the sum
    of each block, as in q8_1."""
    if type == "f32":
        return x, x
    if type == "f16":
        return x.astype(jnp.float16).astype(jnp.float32), x
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    most = jnp.abs(blocks).max(-1, keepdims=True)
    q = jnp.round(blocks * jnp.where(most > 0, 127 / most, 0))
    scale = most / int8_most
    sums = (scale * q.sum(-1, keepdims=True)).astype(jnp.float16).astype(jnp.float32)[..., 0]
    return (q * scale.astype(jnp.float16).astype(jnp.float32)).reshape(x.shape), sums


# ops: each gives the elements of its output


def _params(node: Node) -> Any:
    record = OWN[node.op].params
    assert record is not None
    return record.of(node.params)


def _repeated(b: Array, shape: tuple[int, ...]) -> Array:
    return jnp.tile(b, tuple(n // m for n, m in zip(shape, b.shape, strict=True)))


def _add(at: _Traced, node: Node) -> Array:
    return at.read(node.src[0]) + _repeated(at.read(node.src[1]), node.dst.ne[::-1])


def _mul(at: _Traced, node: Node) -> Array:
    return at.read(node.src[0]) * _repeated(at.read(node.src[1]), node.dst.ne[::-1])


def _scale(at: _Traced, node: Node) -> Array:
    p = _params(node)
    return at.read(node.src[0]) * np.float32(p.scale) + np.float32(p.bias)


def _swiglu(at: _Traced, node: Node) -> Array:
    if len(node.src) > 1:
        gate, up = at.read(node.src[0]), at.read(node.src[1])
    else:
        first, second = jnp.split(at.read(node.src[0]), 2, -1)
        gate, up = (second, first) if _params(node).swapped else (first, second)
    gate = gate.astype(jnp.float32)
    return gate / (1 + jnp.exp(-gate)) * up


def _copy(at: _Traced, node: Node) -> Array:
    return at.read(node.src[0]).reshape(node.dst.ne[::-1])


def _get_rows(at: _Traced, node: Node) -> Array:
    rows, ids = at.read(node.src[0]), at.read(node.src[1])  # (ne3, ne2, ne1, ne0), (1, ne3, ne2, n)
    third, second = np.ogrid[: ids.shape[1], : ids.shape[2]]
    return rows[third[..., None] % rows.shape[0], second[..., None] % rows.shape[1], ids[0]]


def _set_rows(at: _Traced, node: Node) -> Array:
    whole, rows, ids = at.read(node.dst), at.read(node.src[0]), at.read(node.src[1])
    third, second = np.ogrid[: rows.shape[0], : rows.shape[1]]
    found = ids[0, third % ids.shape[1], second % ids.shape[2]]  # (ne3, ne2, n)
    return whole.at[third[..., None], second[..., None], found].set(rows.astype(whole.dtype))


def _rms_norm(at: _Traced, node: Node) -> Array:
    x = at.read(node.src[0])
    return x * (1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + np.float32(_params(node).eps)))


def _soft_max(at: _Traced, node: Node) -> Array:
    x = at.read(node.src[0]) * np.float32(_params(node).scale)
    if len(node.src) > 1:
        mask = at.read(node.src[1]).astype(jnp.float32)[:, :, : x.shape[2]]
        x = x + _repeated(mask, (*x.shape[:2], *mask.shape[2:]))
    return jax.nn.softmax(x, -1)


def _rope(at: _Traced, node: Node) -> Array:
    p, x = _params(node), at.read(node.src[0])
    n = p.n_dims // 2
    steps = np.cumprod(np.array([1.0] + [np.float32(p.freq_base ** (-2 / p.n_dims))] * (n - 1), np.float32))
    angles = at.read(node.src[1]).reshape(-1, 1).astype(jnp.float32) * steps
    if len(node.src) > 2:
        angles = angles / at.read(node.src[2]).reshape(-1)[:n]
    angles = (angles * np.float32(p.freq_scale))[:, None]
    cos, sin = jnp.cos(angles) * np.float32(p.attn_factor), jnp.sin(angles) * np.float32(p.attn_factor)
    first, second = (slice(n), slice(n, 2 * n)) if p.mode == _NEOX else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    u, v = x[..., first], x[..., second]
    return x.at[..., first].set(u * cos - v * sin).at[..., second].set(u * sin + v * cos)


def _mul_mat(at: _Traced, node: Node) -> Array:
    weights = node.src[0]
    assert weights is not None
    x, sums = _rounded(at.read(node.src[1]), weights.type, at.int8_most)
    if weights.type != "q4_1":
        return _product(at.read(weights).astype(jnp.float32), x)
    blocks = at.blocks(weights)  # a minimum is multiplied with the sum of the whole block, and summed up beside it
    w = jnp.concatenate([_half(blocks, 0) * _nibbles(blocks, 4), _half(blocks, 2)], -1)
    x = jnp.concatenate([x.reshape(*sums.shape, 32), sums[..., None]], -1)
    return _product(w.reshape(*w.shape[:3], -1), x.reshape(*x.shape[:3], -1))


def _product(w: Array, x: Array) -> Array:
    w = jnp.repeat(jnp.repeat(w, x.shape[1] // w.shape[1], 1), x.shape[0] // w.shape[0], 0)
    return jnp.einsum("abnk,abmk->abnm", x, w, precision="highest")


_KERNELS: dict[str, Callable[[_Traced, Node], Array]] = {
    "ADD": _add,
    "MUL": _mul,
    "SCALE": _scale,
    "SWIGLU": _swiglu,
    "CONT": _copy,
    "DUP": _copy,
    "CPY": _copy,
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "RMS_NORM": _rms_norm,
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "MUL_MAT": _mul_mat,
}

# op -> types of its output, then of its sources; which of these may be left out
_TYPES: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]] = {
    "ADD": ((FLOATS, FLOATS, FLOATS), ()),
    "MUL": ((FLOATS, FLOATS, FLOATS), ()),
    "SCALE": ((("f32",), ("f32",)), ()),
    "SWIGLU": ((FLOATS, FLOATS, FLOATS), (2,)),
    "CONT": ((FLOATS, FLOATS), ()),
    "DUP": ((FLOATS, FLOATS), ()),
    "CPY": ((FLOATS, FLOATS, FLOATS), ()),
    "GET_ROWS": ((("f32",), WEIGHTS, ("i32",)), ()),
    "SET_ROWS": ((FLOATS, ("f32",), IDS, FLOATS), (3,)),
    "RMS_NORM": ((("f32",), ("f32",)), ()),
    "SOFT_MAX": ((("f32",), ("f32",), FLOATS), (2,)),
    "ROPE": ((FLOATS, FLOATS, ("i32",), ("f32",)), (3,)),
    "MUL_MAT": ((("f32",), WEIGHTS, ("f32",)), ()),
}


XLA.ops = tuple(_KERNELS)


def _refusal_of_params(node: Node) -> str | None:
    if node.op in ("ADD", "MUL"):
        b = node.src[1]
        assert b is not None
        return "does not repeat" if any(n % m for n, m in zip(node.dst.ne, b.ne, strict=True)) else None
    if node.op == "MUL_MAT":
        a, b = node.src
        assert a is not None
        assert b is not None
        return "batches do not repeat" if b.ne[2] % a.ne[2] or b.ne[3] % a.ne[3] else None
    if node.op == "SOFT_MAX" and _params(node).max_bias:
        return "ALiBi"
    if node.op == "ROPE":
        p = _params(node)
        if p.mode not in (_NORMAL, _NEOX) or p.ext_factor or p.n_offs or node.dst.ne[3] != 1:
            return f"mode {p.mode}, ext_factor {p.ext_factor}"
    return None
