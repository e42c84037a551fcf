"""The compiled mover: walks two tensors in logical order, a run at a time, at any strides, one side by row ids.

GET_ROWS, SET_ROWS, CPY, DUP, CONT and the parts of CONCAT differ only in how a row is found: GET_ROWS reads rows by
ids, SET_ROWS writes them by ids, the others go in order. `mover` makes the bound call for all of them, and `repeater`
that of REPEAT.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import PLAIN, Numerics
from ggml_backend_npu.registry import Call, KernelError
from quant import Rounding
from quant.kernels.jit import LINE, array_at, compiled, copy, inlined, keep, parameters, stream, stream_ends, values
from quant.kernels.threads import PARTS, Job, Work
from quant.kernels.vectors import INT8, INT16, INT32, INT64, part, transposed
from quant.runs import CACHED, CODES, F16, F16_FOURS, STAGE, convert_run, copy_blocks, copy_run, flush

_SAME = -1  # source code of a copy: both sides have one type
_MOST_ROWS_MARKED = 1 << 20  # of which one byte each is remembered
_PAGE, _TILE_BYTES = 4096, 16384  # of tiles of a transposition

# the parameters of a walk: two sides, each
#   address, ne[4] in units, nb[4]; for a side by ids: address, bytes of an id, nb[3], ne[1], ne[2] and rows;
#   for a packed side: address and blocks of the packed tensor
_ADDRESS, NE, NB, _IDS, _ID_BYTES, _IDS_NB, _IDS_NE1, _IDS_NE2 = 0, 1, 5, 9, 10, 11, 14, 15
_N_ROWS, _PACKED, _N_PACKED = 16, 17, 18
SIDE = 19

Parameters = NDArray[np.int64]


@inlined
def _row_id(side, i1, i2, i3):
    address = side[_IDS] + i1 * side[_IDS_NB]
    address += (i2 % side[_IDS_NE1]) * side[_IDS_NB + 1] + (i3 % side[_IDS_NE2]) * side[_IDS_NB + 2]
    if side[_ID_BYTES] == 8:
        return types.int64(array_at(address, types.int64, 1)[0])
    return types.int64(array_at(address, types.int32, 1)[0])


@inlined
def row_address(side, i1, i2, i3):
    """Where row (i1, i2, i3) of a side begins; i1 goes through the side's ids, where it has any."""
    if side[_IDS]:
        i1 = _row_id(side, i1, i2, i3)
    return side[_ADDRESS] + i1 * side[NB + 1] + i2 * side[NB + 2] + i3 * side[NB + 3]


@inlined
def locate(side, unit):
    """The indices of a unit in the logical order, fastest first."""
    i0 = unit % side[NE]
    row = unit // side[NE]
    i1 = row % side[NE + 1]
    row //= side[NE + 1]
    return i0, i1, row % side[NE + 2], row // side[NE + 2]


@inlined
def next_row(side, i1, i2, i3):
    """The indices of the row behind row (i1, i2, i3)."""
    i1 += 1
    if i1 == side[NE + 1]:
        i1 = 0
        i2 += 1
        if i2 == side[NE + 2]:
            i2 = 0
            i3 += 1
    return i1, i2, i3


@inlined
def _move_run(
    src_code, src_unit, src, src_step, src_packed, src_n, dst_code, dst, dst_step, dst_packed, dst_n, count
):  # fmt: skip
    if src_code != _SAME:
        convert_run(src_code, src, src_step, src_packed, src_n, dst_code, dst, dst_step, dst_packed, dst_n, count)
    elif src_n or dst_n:
        copy_blocks(src_unit - 2, src, src_step, src_packed, src_n, dst, dst_step, dst_packed, dst_n, count)
    else:
        copy_run(src_unit, src, src_step, dst, dst_step, count)


@inlined
def _sides(p):
    """The two sides that come first among a kernel's parameters."""
    return array_at(p, types.int64, SIDE), array_at(p + 8 * SIDE, types.int64, SIDE)


@compiled
def walk(p, begin, end):
    """Units [begin, end) of the logical order, from side src to side dst; unit sizes in bytes.

    streams  the rows of dst, long and without gaps, are stored past the caches: put together in a stage, where they
             are not copied as they are
    """
    src, dst = _sides(p)
    src_code, src_unit, dst_code, dst_unit, streams = values(p + 16 * SIDE, 5)
    memory = np.empty(STAGE + LINE if streams else 0, np.uint8)
    stage = types.int64(memory.ctypes.data)
    whole = streams and src_code == _SAME and src[NB] == src_unit and src[NE] * src_unit >= STAGE
    s0, s1, s2, s3 = locate(src, begin)
    d0, d1, d2, d3 = locate(dst, begin)
    src_row = row_address(src, s1, s2, s3)
    dst_row = row_address(dst, d1, d2, d3)
    filled, target = types.int64(0), dst_row + d0 * dst[NB]
    unit = begin
    while unit < end:
        count = min(end - unit, src[NE] - s0, dst[NE] - d0)
        to = dst_code
        if dst_code == F16_FOURS:
            fours = dst[NE] - dst[NE] % 4
            if d0 < fours:
                count = min(count, fours - d0)
            else:
                to = F16
        x = src_row + s0 * src[NB]
        y = dst_row + d0 * dst[NB]
        if whole:
            stream(x, y, count * dst_unit)
        else:
            if streams:
                count = min(count, (STAGE + LINE - filled) // dst_unit)
                y = stage + filled
                filled += count * dst_unit
            _move_run(
                src_code, src_unit, x, src[NB], src[_PACKED], src[_N_PACKED],
                to, y, dst[NB], dst[_PACKED], dst[_N_PACKED], count,
            )  # fmt: skip
        unit += count
        s0 += count
        d0 += count
        row_ends = d0 == dst[NE] or unit == end
        if filled and (row_ends or filled + dst_unit > STAGE + LINE):
            filled, target = flush(stage, filled, target, row_ends)
        if unit < end:
            if s0 == src[NE]:
                s0 = 0
                s1, s2, s3 = next_row(src, s1, s2, s3)
                src_row = row_address(src, s1, s2, s3)
            if d0 == dst[NE]:
                d0 = 0
                d1, d2, d3 = next_row(dst, d1, d2, d3)
                dst_row = row_address(dst, d1, d2, d3)
                target = dst_row
    if streams:
        stream_ends()
    keep(memory)
    return 0


def _square(kind, n):
    @part
    def turn(source, source_step, target, target_step):
        """A square of n * n elements: the rows of source, which lie source_step apart, are the columns of target."""
        rows = []
        for _ in range(n):
            rows.append(source.load(kind, n))
            source = source + source_step
        for row in transposed(rows):
            target.store(row)
            target = target + target_step

    return turn


_turn_8_bit, _turn_16_bit, _turn_32_bit, _turn_64_bit = (
    _square(kind, n) for kind, n in ((INT8, 16), (INT16, 16), (INT32, 8), (INT64, 8))
)


@inlined
def _gather(turn, n, element, unit, src, nb0, n0, n1, to, step):
    """n1 adjacent elements at each of n0 places become n1 rows, `step` bytes apart."""
    whole0, whole1 = n0 - n0 % n, n1 - n1 % n
    for i in range(0, whole0, n):
        for j in range(0, whole1, n):
            turn(src + i * nb0 + j * unit, nb0, to + j * step + i * unit, step)
    for i in range(n0):
        x = array_at(src + i * nb0, element, n1)
        for j in range(whole1 if i < whole0 else 0, n1):
            array_at(to + j * step, element, n0)[i] = x[j]


@compiled
def transpose(p, begin, end):
    """Tiles [begin, end) of two sides of the same ne: src has dimension 1 without gaps, dst dimension 0.

    A unit of either side is per_unit adjacent elements. A tile has tile1 units of src, side by side, at each of tile0
    places in dimension 0; it is gathered in the first cache, so that each side is touched a whole cache line at a time.
    """
    src, dst = _sides(p)
    src_code, src_unit, dst_code, dst_unit, streams, per_unit, tile0, tile1 = values(p + 16 * SIDE, 8)
    step = tile0 * src_unit
    memory = np.empty(tile1 * step + tile0 * dst_unit, np.uint8)
    rows = types.int64(memory.ctypes.data)
    stage = rows + tile1 * step
    n0, n1 = -(-src[NE] // tile0), -(-src[NE + 1] // tile1)
    for tile in range(begin, end):
        i1 = tile % n1 * tile1
        i0 = tile // n1 % n0 * tile0
        i2, i3 = tile // n1 // n0 % src[NE + 2], tile // n1 // n0 // src[NE + 2]
        count0, count1 = min(tile0, src[NE] - i0), min(tile1, src[NE + 1] - i1)
        x = row_address(src, i1, i2, i3) + i0 * src[NB]
        if streams and src_code == _SAME and src_unit >= 128:
            for i in range(count0):
                for j in range(count1):
                    y = row_address(dst, i1 + j, i2, i3) + (i0 + i) * dst_unit
                    stream(x + i * src[NB] + j * src_unit, y, src_unit)
            continue
        if src_unit == 4:
            _gather(_turn_32_bit, 8, types.uint32, 4, x, src[NB], count0, count1, rows, step)
        elif src_unit == 2:
            _gather(_turn_16_bit, 16, types.uint16, 2, x, src[NB], count0, count1, rows, step)
        elif src_unit == 8:
            _gather(_turn_64_bit, 8, types.uint64, 8, x, src[NB], count0, count1, rows, step)
        elif src_unit == 1:
            _gather(_turn_8_bit, 16, types.uint8, 1, x, src[NB], count0, count1, rows, step)
        else:
            for i in range(count0):
                for j in range(count1):
                    copy(x + i * src[NB] + j * src_unit, rows + j * step + i * src_unit, src_unit)
        for j in range(count1):
            x = rows + j * step
            y = row_address(dst, i1 + j, i2, i3) + i0 * dst_unit
            if src_code != _SAME:
                z = stage if streams else y
                n = count0 * per_unit
                convert_run(src_code, x, src_unit // per_unit, 0, 0, dst_code, z, dst_unit // per_unit, 0, 0, n)
                x = stage
            if streams:
                stream(x, y, count0 * dst_unit)
            elif src_code == _SAME:
                copy(x, y, count0 * dst_unit)
    if streams:
        stream_ends()
    keep(memory)
    return 0


@compiled
def repeat(p, begin, end):
    """Rows [begin, end) of dst, each a row of src again and again; sizes of rows in bytes."""
    (
        src, src_row, src_ne1, src_ne2, src_ne3, src_nb1, src_nb2, src_nb3,
        dst, dst_row, dst_ne1, dst_ne2, dst_nb1, dst_nb2, dst_nb3,
    ) = values(p, 15)  # fmt: skip
    for index in range(begin, end):
        i1, i2, i3 = index % dst_ne1, index // dst_ne1 % dst_ne2, index // dst_ne1 // dst_ne2
        x = src + i1 % src_ne1 * src_nb1 + i2 % src_ne2 * src_nb2 + i3 % src_ne3 * src_nb3
        y = dst + i1 * dst_nb1 + i2 * dst_nb2 + i3 * dst_nb3
        copy(x, y, src_row)
        filled = src_row
        while filled < dst_row:
            count = min(filled, dst_row - filled)
            copy(y, y + filled, count)
            filled += count
    return 0


@inlined
def _first_bad_id(side):
    where = 0
    for i3 in range(side[_IDS_NE2]):
        for i2 in range(side[_IDS_NE1]):
            for i1 in range(side[NE + 1]):
                row = _row_id(side, i1, i2, i3)
                if row < 0 or row >= side[_N_ROWS]:
                    return where
                where += 1
    return -1


@inlined
def _all_differ(side):
    """Whether no id comes twice in a matrix; False too where that would take long to find out."""
    n_rows = side[_N_ROWS]
    seen = np.zeros(0, np.uint8)
    for i3 in range(side[_IDS_NE2]):
        for i2 in range(side[_IDS_NE1]):
            last, i1 = types.int64(-1), 0
            while i1 < side[NE + 1] and _row_id(side, i1, i2, i3) > last:
                last = _row_id(side, i1, i2, i3)
                i1 += 1
            if i1 == side[NE + 1]:
                continue
            if n_rows > _MOST_ROWS_MARKED:
                return False
            seen = np.zeros(n_rows, np.uint8)
            for i1 in range(side[NE + 1]):
                row = _row_id(side, i1, i2, i3)
                if seen[row]:
                    return False
                seen[row] = 1
    return True


@compiled
def check_ids(p, begin, end):
    """Returns 1 + where among a side's ids, in logical order, the first one lies that names no row; 0 where all do.

    Where another work is to write rows by these ids, its address and the parts that it could be cut into are given: it
    is only where no row is written twice, so that of two the last one stays.
    """
    side = array_at(p, types.int64, SIDE)
    work, parts = values(p + 8 * SIDE, 2)
    bad = _first_bad_id(side)
    if bad >= 0:
        return bad + 1
    if work:
        array_at(work, types.int64, PARTS + 1)[PARTS] = parts if parts == 1 or _all_differ(side) else 1
    return 0


def side_at(address: int, ne: list[int], nb: list[int], ids: Tensor | None = None) -> Parameters:
    """A side of a walk: ne units and nb bytes per dimension, fastest first; where ids are given they name its rows."""
    side = np.zeros(SIDE, np.int64)
    if ids is None:
        ne, nb = _merged(ne, nb)
    else:
        side[_IDS], side[_ID_BYTES] = ids.address, ids.codec.block_bytes
        side[_IDS_NB : _IDS_NB + 3] = ids.nb[:3]
        side[_IDS_NE1], side[_IDS_NE2] = ids.ne[1], ids.ne[2]
    side[_ADDRESS] = address
    side[NE : NE + 4] = ne
    side[NB : NB + 4] = nb
    return side


def _side(tensor: Tensor, ne: tuple[int, ...], unit: int, ids: Tensor | None) -> Parameters:
    """A tensor as a side of the walk over logical dimensions ne, in units of `unit` elements."""
    step = tensor.nb[0] * (unit // tensor.codec.block_size)
    side = side_at(tensor.address, [ne[0] // unit, *ne[1:]], [step, *tensor.nb[1:]], ids)
    if tensor.packed is not None:
        side[_PACKED], side[_N_PACKED] = tensor.packed.address, tensor.packed.n_blocks
    if ids is not None:
        side[_N_ROWS] = tensor.ne[1]
    return side


def _merged(ne: list[int], nb: list[int]) -> tuple[list[int], list[int]]:
    """Dimensions that follow each other without a gap become one: longer runs, the same order."""
    sizes, strides = [ne[0]], [nb[0]]
    for n, stride in zip(ne[1:], nb[1:], strict=True):
        if sizes[-1] == 1:
            sizes[-1], strides[-1] = n, stride
        elif n != 1 and stride == strides[-1] * sizes[-1]:
            sizes[-1] *= n
        elif n != 1:
            sizes.append(n)
            strides.append(stride)
    missing = 4 - len(sizes)
    return sizes + [1] * missing, strides + [0] * missing


def code(type: str, rounding: Rounding) -> int | None:
    """What the compiled walk calls a type, under a q8_0 rounding; None where it has none."""
    return CODES.get(f"{type} {rounding}", CODES.get(type))


def mover(
    dst: Tensor,
    src: Tensor,
    src_ids: Tensor | None = None,
    dst_ids: Tensor | None = None,
    numerics: Numerics = PLAIN,
) -> Job | None:
    """The call that moves src to dst, reading or writing rows by ids; None where a type has no compiled run.

    numerics  whose codecs and rounding are to be had
    """
    dst_type = "f16 fours" if dst_ids is not None and dst.type == "f16" else dst.type
    src_code, dst_code = code(src.type, numerics.rounding), code(dst_type, numerics.rounding)
    if src.type == dst.type:
        src_code = dst_code = _SAME
    if src_code is None or dst_code is None or (dst_type in numerics.bound and src_code != _SAME):
        return None
    n_elements = src.n_elements if src_ids is None else dst.n_elements
    if n_elements == 0:
        return Job()
    unit = max(src.codec.block_size, dst.codec.block_size)
    if src_ids is None and dst_ids is None:
        source, target = _side(src, _flat_if(src, unit), unit, None), _side(dst, _flat_if(dst, unit), unit, None)
    else:
        ne = dst.ne if dst_ids is None else src.ne
        source, target = _side(src, ne, unit, src_ids), _side(dst, ne, unit, dst_ids)
    n_units = n_elements // unit
    src_unit, dst_unit = (int(unit * _element_bytes(tensor)) for tensor in (src, dst))
    n_bytes = n_units * max(src_unit, dst_unit)
    large = n_units * dst_unit > CACHED
    streams = bool(large and target[NE] * dst_unit >= STAGE and target[NB] == dst_unit and not target[_N_PACKED])
    sizes = src_code, src_unit, dst_code, dst_unit
    if src_ids is None and dst_ids is None:
        turned = _turned(dst, src) if unit == 1 else None
        if turned is not None:
            sides, per_unit = turned
            tile0, tile1 = _tile(src_unit * per_unit)
            p = parameters(
                *sides, src_code, src_unit * per_unit, dst_code, dst_unit * per_unit, large, per_unit, tile0, tile1
            )
            n0, n1, n2, n3 = (int(n) for n in sides[0][NE : NE + 4])
            return Job(Work(transpose, p, -(-n0 // tile0) * -(-n1 // tile1) * n2 * n3, n_bytes))
    move = Work(walk, parameters(source, target, *sizes, streams), n_units, n_bytes)
    if src_ids is not None:
        return Job(_check(source, src_ids), move)
    if dst_ids is not None:
        return Job(_check(target, dst_ids, move), move)
    return Job(move)


def repeater(dst: Tensor, src: Tensor) -> Call:
    """The call that fills dst with src, again and again in each dimension; the rows of both have no gaps."""
    src_row, dst_row = (tensor.ne[0] * tensor.codec.block_bytes for tensor in (src, dst))
    p = parameters(
        src.address, src_row, *src.ne[1:], *src.nb[1:], dst.address, dst_row, *dst.ne[1:3], *dst.nb[1:]
    )  # fmt: skip
    n_rows = dst.ne[1] * dst.ne[2] * dst.ne[3]
    return Job(Work(repeat, p, n_rows, n_rows * dst_row, keep=(dst, src)))


def _check(side: Parameters, ids: Tensor, move: Work | None = None) -> Work:
    """The check of the ids of a side, which `move` writes by."""
    writes = (0, 1) if move is None else (move.address, move.most_parts)
    return Work(
        check_ids,
        parameters(side, *writes),
        1,
        keep=move,
        failed=lambda status: bad_id(ids, status - 1, int(side[_N_ROWS])),
    )


def ids_check(ids: Tensor, n_rows: int) -> Work:
    """The check that a matrix of ids, or several, names none but n_rows rows. Raises KernelError for the first one."""
    side = side_at(0, [1, ids.ne[0], 1, 1], [0] * 4, ids)
    side[_N_ROWS] = n_rows
    return _check(side, ids)


def _tile(unit_bytes: int) -> tuple[int, int]:
    """Units of a tile in dimensions 0 and 1: of single elements a cache line side by side, of longer runs a page."""
    beside = LINE if unit_bytes <= 8 else _PAGE
    tile1 = max(1, beside // unit_bytes)
    return max(1, _TILE_BYTES // (tile1 * unit_bytes)), tile1


def _turned(dst: Tensor, src: Tensor) -> tuple[tuple[Parameters, Parameters], int] | None:
    """Both as the sides of `transpose`, their dimensions in its order, and how many elements make a unit; None where it
    is no transposition."""
    if src.ne != dst.ne:
        return None
    axes, per_unit = [i for i in range(4) if src.ne[i] > 1], 1
    dense = [_dense_axis(tensor, axes, 1) for tensor in (dst, src)]
    if dense[0] is not None and dense[0] == dense[1]:
        per_unit = src.ne[dense[0]]
        axes.remove(dense[0])
        dense = [_dense_axis(tensor, axes, per_unit) for tensor in (dst, src)]
    if None in dense or dense[0] == dense[1] or per_unit * src.codec.block_bytes > _PAGE // 2:
        return None
    order = [axis for axis in dense if axis is not None]
    order += [axis for axis in axes if axis not in order]
    sides = tuple(np.zeros(SIDE, np.int64) for _ in range(2))
    for side, tensor in zip(sides, (src, dst), strict=True):
        side[_ADDRESS] = tensor.address
        side[NE : NE + 4] = [tensor.ne[i] for i in order] + [1] * (4 - len(order))
        side[NB : NB + 4] = [tensor.nb[i] for i in order] + [0] * (4 - len(order))
    return (sides[0], sides[1]), per_unit


def _dense_axis(tensor: Tensor, axes: list[int], per_unit: int) -> int | None:
    """The one of some dimensions in which units of so many elements are adjacent."""
    return next((i for i in axes if tensor.nb[i] == per_unit * tensor.codec.block_bytes), None)


def _flat_if(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """ne, or one dimension where rows are no whole units: q -> f32 into a contiguous tensor of any shape."""
    return tensor.ne if tensor.ne[0] % unit == 0 else (tensor.n_elements, 1, 1, 1)


def _element_bytes(tensor: Tensor) -> float:
    return tensor.codec.block_bytes / tensor.codec.block_size


def make_ready() -> None:
    """Compiles the kernels of this module, or loads them: once, and not in the middle of a graph."""
    for kernel in (walk, transpose, check_ids):
        _ = kernel.address


def bad_id(ids: Tensor, where: int, n_rows: int) -> KernelError:
    """The error of the id at `where`, in logical order, that names none of n_rows rows."""
    i0, rest = where % ids.ne[0], where // ids.ne[0]
    i1, i2 = rest % ids.ne[1], rest // ids.ne[1]
    value = int(ids.view()[0, i2, i1, i0])
    return KernelError(f"row id {value} at {ids.name or 'ids'}[{i2}, {i1}, {i0}] is outside 0..{n_rows - 1}")
