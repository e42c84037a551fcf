"""op_params as records: their bytes, and the fields against what ggml itself writes into a node."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind, record_of

from ggml_backend_npu import Node, Op, Tensor, default_backend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ir import PARAMS_BYTES
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.elementwise import Scale
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.registry.params import Params, f32, i32

RECORDS: dict[str, type[Params]] = {name: op.params for name, op in OWN.items() if op.params is not None}

ORDERED: list[type[Params]] = sorted(set(RECORDS.values()), key=lambda kind: kind.__name__)
records = pytest.mark.parametrize("record", ORDERED)


@dataclass(frozen=True)
class Mixed(Params):
    first: i32
    second: f32
    third: i32


def words(record: type[Params]) -> list[st.SearchStrategy[Any]]:
    kinds = {"i": st.integers(-(2**31), 2**31 - 1), "f": st.floats(width=32, allow_nan=False)}
    return [kinds[kind] for kind in record._layout().format.removeprefix("<")]


# bytes


def test_the_layout_follows_from_the_fields() -> None:
    assert Mixed.names() == ("first", "second", "third")
    assert Mixed(-1, 0.5, 7).packed == struct.pack("<ifi", -1, 0.5, 7) + bytes(52)


@records
@given(data=st.data())
def test_bytes_are_read_as_they_are_written(record: type[Params], data: st.DataObject) -> None:
    numbers = [data.draw(word) for word in words(record)]
    found = record(*numbers)
    assert len(found.packed) == PARAMS_BYTES
    assert record.of(found.packed) == found
    assert record.of(found.packed).packed == found.packed


@records
def test_what_bytes_are_too_short_for_is_0(record: type[Params]) -> None:
    full = record(*range(1, len(record.names()) + 1))
    for n in range(len(record.names()) + 1):
        expected = [value if i < n else 0 for i, value in enumerate(range(1, len(record.names()) + 1))]
        assert record.of(full.packed[: 4 * n]) == record(*expected)


def test_a_kernel_gets_the_record_or_the_bytes() -> None:
    def kernel(dst: Tensor, x: Tensor, params: Any) -> None:
        got.append(params)

    def plain(dst: Tensor, x: Tensor) -> None:
        pass

    got: list[Any] = []
    x = Tensor.of(np.ones(4, np.float32))
    node = Node("SCALE", x, (x,), Scale(2, 3).packed)
    for record in (Scale, None):
        with default_backend().ops.having(Op("SCALE", kernel, params=record)):
            bind(node)()
    assert got == [Scale(2, 3), node.params]
    assert Op("SCALE", plain, params=Scale).keywords(node) == {}


# fields, against ggml

Case = tuple[str, Callable[[Builder], int], dict[str, Any]]

FLOATS = [0.5, 2.25, -3.5, 8.0, 32.0, 1.5]


def cases() -> Iterator[Case]:
    """Of each op: what ggml's own function is asked for, and the fields in which that has to stand."""

    def x(build: Builder, *ne: int) -> int:
        return build.tensor("f32", ne or (8, 6, 4, 2))

    yield "SCALE", lambda b: b.op("scale_bias", x(b), 0.5, 2.25), {"scale": 0.5, "bias": 2.25}
    yield "CLAMP", lambda b: b.op("clamp", x(b), -3.5, inf), {"min": -3.5, "max": inf}
    yield "FILL", lambda b: b.op("fill", x(b), 0.5), {"c": 0.5}
    yield "CONCAT", lambda b: b.op("concat", x(b), x(b), 2), {"dim": 2}
    yield "ARGSORT", lambda b: b.op("argsort", x(b), 1), {"order": 1}
    yield "TRI", lambda b: b.op("tri", x(b, 6, 6), 3), {"type": 3}

    def mask(build: Builder, cells: int, rows: int) -> int:
        return build.tensor("f16", (cells, rows))

    yield (
        "SOFT_MAX",
        lambda b: b.op("soft_max_ext", x(b), mask(b, 8, 6), 0.5, 8.0),
        {"scale": 0.5, "max_bias": 8.0},
    )

    def attention(b: Builder) -> int:
        q, k, v = x(b, 64, 3, 4), x(b, 64, 5, 4), x(b, 64, 5, 4)
        return b.op("flash_attn_ext", q, k, v, mask(b, 5, 64), 0.5, 8.0, 32.0)

    yield "FLASH_ATTN_EXT", attention, {"scale": 0.5, "max_bias": 8.0, "logit_softcap": 32.0, "prec": 0, "n_kv_max": 0}

    taken = dict.fromkeys(("n_past", "n_ctx"), 0)
    factors = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
    yarn = dict(zip(factors, FLOATS, strict=True))
    sections = {"section_t": 1, "section_h": 2, "section_w": 3, "section_e": 4}

    def positions(b: Builder, n: int) -> int:
        return b.tensor("i32", (n,))

    for op, name in (("ROPE", "ext"), ("ROPE_BACK", "ext_back")):
        yield (
            op,
            partial(lambda name, b: b.op(f"rope_{name}", x(b), positions(b, 4), None, 6, 2, 512, *FLOATS), name),
            taken | {"n_dims": 6, "mode": 2, "n_ctx_orig": 512} | yarn | dict.fromkeys(sections, 0) | {"n_offs": 0},
        )
    for op, name in (("ROPE", "multi"), ("ROPE_BACK", "multi_back")):
        yield (
            op,
            partial(
                lambda name, b: b.op(
                    f"rope_{name}", x(b), positions(b, 16), None, 8, (ctypes.c_int * 4)(1, 2, 3, 4), 8, 512, *FLOATS
                ),
                name,
            ),
            taken | {"n_dims": 8, "mode": 8, "n_ctx_orig": 512} | yarn | sections | {"n_offs": 0},
        )

    def from_the_third(b: Builder) -> int:
        node = b.op("rope_ext", x(b), positions(b, 4), None, 4, 0, 512, *FLOATS)
        b.function("rope_set_offset")(node, 2)
        return node

    yield "ROPE", from_the_third, {"n_dims": 4, "n_offs": 2}
    for number, op in sorted(lib.ggml().functions["GLU"].items()):
        if op in OWN and op not in ("SWIGLU_OAI", "SWIGLU_CLAMP"):
            yield op, partial(lambda number, b: b.op("glu", x(b), number, True), number), {"op": number, "swapped": 1}
    yield "SWIGLU_OAI", lambda b: b.op("swiglu_oai", x(b), x(b), 0.5, 2.25), {"alpha": 0.5, "limit": 2.25}
    yield "SWIGLU_CLAMP", lambda b: b.op("swiglu_clamp", x(b), x(b), 2.25), {"limit": 2.25}
    (xielu,) = (number for number, op in lib.ggml().functions["UNARY"].items() if op == "XIELU")
    yield "XIELU", lambda b: b.op("xielu", x(b), 0.0, 0.0, 2.25, 1.5), {
        "op": xielu, "alpha_n": np.float32(2.25 + np.log(2)), "alpha_p": np.float32(np.log(2)),
        "beta": 2.25, "eps": 1.5,
    }  # fmt: skip
    part = {"nb1": 32, "nb2": 192, "nb3": 768, "offset": 4}
    for name, in_place in (("set", 0), ("set_inplace", 1)):
        yield (
            "SET",
            partial(lambda name, b: b.op(name, x(b), x(b, 4, 3), *part.values()), name),
            part | {"inplace": in_place},
        )
    for name, in_place in (("acc", 0), ("acc_inplace", 1)):
        yield (
            "ACC",
            partial(lambda name, b: b.op(name, x(b), x(b, 4, 3), *part.values()), name),
            part | {"inplace": in_place},
        )
    for kind in ("inf", "zero"):
        yield (
            f"DIAG_MASK_{kind.upper()}",
            partial(lambda kind, b: b.op(f"diag_mask_{kind}", x(b), 3), kind),
            {"n_past": 3},
        )
    yield "LEAKY_RELU", lambda b: b.op("leaky_relu", x(b), 0.25, False), {"negative_slope": 0.25}
    yield "SOFT_MAX_BACK", lambda b: b.op("soft_max_ext_back", x(b), x(b), 0.5, 0.0), {"scale": 0.5, "max_bias": 0.0}

    def product(b: Builder) -> int:
        node = b.op("mul_mat", x(b, 8, 8), x(b, 8, 3))
        b.function("mul_mat_set_prec")(node, 10)
        b.function("mul_mat_set_hint")(node, 1)
        return node

    yield "MUL_MAT", product, {"prec": 10, "hint": 1}
    edges = dict(zip(("lp0", "rp0", "lp1", "rp1", "lp2", "rp2", "lp3", "rp3"), range(1, 9), strict=True))
    for name, circular in (("pad_ext", 0), ("pad_ext_circular", 1)):
        yield "PAD", partial(lambda name, b: b.op(name, x(b), *range(1, 9)), name), edges | {"circular": circular}
    yield "POOL_2D", lambda b: b.op("pool_2d", x(b, 32, 32), 1, 3, 4, 5, 6, 1.0, 2.0), {
        "op": 1, "k0": 3, "k1": 4, "s0": 5, "s1": 6, "p0": 1, "p1": 2,
    }  # fmt: skip
    for is_2d, kernel in ((1, (3, 3, 4)), (0, (3, 6))):
        yield (
            "IM2COL",
            partial(
                lambda is_2d, kernel, b: b.op(
                    "im2col", x(b, *kernel), x(b, 16, 16, 4) if is_2d else x(b, 16, 6), 1, 2, 3, 4, 5, 6, bool(is_2d), 0
                ),
                is_2d,
                kernel,
            ),
            {"s0": 1, "s1": 2, "p0": 3, "p1": 4, "d0": 5, "d1": 6, "is_2d": is_2d},
        )
    flat = {"s0": 1, "s1": 2, "p0": 3, "p1": 4, "d0": 5, "d1": 6}
    moves = dict(zip(("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2"), range(1, 10), strict=True))

    def back(b: Builder) -> int:
        dims = (ctypes.c_int64 * 4)(16, 16, 4, 1)
        return b.op("im2col_back", x(b, 36, 8, 8), x(b, 3, 3, 4), dims, *flat.values(), True)

    yield "IM2COL_BACK", back, flat | {"is_2d": 1}
    yield "IM2COL_3D", lambda b: b.op("im2col_3d", x(b, 1, 1, 1, 2), x(b, 16, 16, 16, 2), 2, *moves.values(), 0), {
        **moves, "IC": 2,
    }  # fmt: skip
    yield "CONV_3D", lambda b: b.op(
        "conv_3d_direct", x(b, 1, 1, 1, 6), x(b, 16, 16, 16, 2), *moves.values(), 2, 1, 3
    ), {**moves, "c": 2, "n": 1, "oc": 3}  # fmt: skip
    yield "CONV_2D", lambda b: b.op("conv_2d_direct", x(b, 1, 1, 2, 3), x(b, 16, 16, 2), *flat.values()), flat
    yield "CONV_2D_DW", lambda b: b.op("conv_2d_dw_direct", x(b, 1, 1, 1, 3), x(b, 16, 16, 3), *flat.values()), flat
    yield "POOL_2D_BACK", lambda b: b.op("pool_2d_back", x(b, 6, 6), x(b, 32, 32), 1, 3, 4, 5, 6, 1.0, 2.0), {
        "op": 1, "k0": 3, "k1": 4, "s0": 5, "s1": 6, "p0": 1, "p1": 2,
    }  # fmt: skip
    yield "UPSCALE", lambda b: b.op("interpolate", x(b, 4, 4), 8, 8, 1, 1, 513), {"mode": 513}
    yield "PAD_REFLECT_1D", lambda b: b.op("pad_reflect_1d", x(b, 9), 3, 4), {"p0": 3, "p1": 4}
    yield "WIN_PART", lambda b: b.op("win_part", x(b, 4, 5, 9), 2), {"nep0": 3, "nep1": 5, "w": 2}
    yield "WIN_UNPART", lambda b: b.op("win_unpart", x(b, 4, 2, 2, 15), 5, 9, 2), {"w": 2}
    for name, in_place in (("add_rel_pos", 0), ("add_rel_pos_inplace", 1)):
        yield "ADD_REL_POS", partial(lambda name, b: b.op(name, x(b, 9, 6), x(b, 3, 3, 2), x(b, 3, 3, 2)), name), {
            "inplace": in_place,
        }  # fmt: skip
    yield "DSV4_HC_PRE", lambda b: b.op("dsv4_hc_pre", x(b, 8, 4, 5), x(b, 4, 5)), {"scale": 1.0, "gated": 0}
    yield "DSV4_HC_PRE", lambda b: b.op("dsv4_hc_pre_gated", x(b, 8, 4, 5), x(b, 8, 4, 5), 0.5), {
        "scale": 0.5, "gated": 1,
    }  # fmt: skip

    def scan(b: Builder) -> int:
        group = (16, 1, 5, 2)
        sources = x(b, 16, 8, 2, 2), x(b, 8, 2, 5, 2), x(b, 2, 5, 2), x(b, 1, 2), x(b, *group), x(b, *group)
        return b.op("ssm_scan", *sources, positions(b, 2), 3)

    yield "SSM_SCAN", scan, {"K": 3}

    def delta(b: Builder) -> int:
        q, k, v = (x(b, 8, 2, 5, 1) for _ in range(3))
        return b.op("gated_delta_net", q, k, v, x(b, 1, 2, 5, 1), x(b, 1, 2, 5, 1), x(b, 8, 8, 2, 1), 3)

    yield "GATED_DELTA_NET", delta, {"K": 3}


def by_its_nodes(op: Op) -> Case:
    """An op whose function takes the sources, and the parameters in the order of its record. That each has the right
    name, the op's comparison with the CPU shows."""
    made = op.makes[0](np.random.default_rng(0), next(iter(sorted(op.types or ()))))
    params = record_of(op.name).of(made.params)
    fields = {name: getattr(params, name) for name in params.names()}
    (function,) = op.functions

    def build(b: Builder) -> int:
        sources = [b.tensor(x.type, x.ne) for x in made.src if x is not None]
        return b.op(function.removeprefix("ggml_"), *sources, *fields.values())

    return op.name, build, fields


CASES = list(cases())
CASES += [by_its_nodes(OWN[name]) for name in sorted({*RECORDS} - {name for name, _, _ in CASES})]


def test_every_record_is_compared_with_ggml() -> None:
    assert {op for op, _, _ in CASES} == set(RECORDS)
    compared: dict[type[Params], set[str]] = {}
    for op, _, fields in CASES:
        compared.setdefault(RECORDS[op], set()).update(fields)
    assert compared == {record: set(record.names()) for record in RECORDS.values()}


@pytest.mark.parametrize(("op", "make", "fields"), CASES, ids=[f"{op} {i}" for i, (op, _, _) in enumerate(CASES)])
def test_a_field_is_where_ggml_writes_it(op: str, make: Callable[[Builder], int], fields: dict[str, Any]) -> None:
    with Builder(lib.ggml(), "CPU") as build:
        node = build.as_node(make(build))
    assert node.op == op
    found = RECORDS[op].of(node.params)
    assert {name: getattr(found, name) for name in fields} == fields
    assert found.packed == node.params, "what ggml writes behind the record"
