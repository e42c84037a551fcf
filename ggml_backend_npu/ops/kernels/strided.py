"""The compiled mover: walks through two tensors in logical order, a run at a time, at any strides; one side may use row
ids.

GET_ROWS, SET_ROWS, CPY, DUP, CONT and the parts of CONCAT differ only in how a row is found: GET_ROWS reads rows by
ids, SET_ROWS writes them by ids, the others go in order. `bind_move` makes the bound call for all of them, and
`bind_repeat` that of REPEAT.
"""

from __future__ import annotations

from typing import NamedTuple

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.sides import Side, locate, next_row, padded, row_address, row_id, side_at
from ggml_backend_npu.registry.entry import Call, KernelError
from quant.conversions import F16, F16_FOURS, conversion, convert_run
from quant.kernels.jit import LINE, allocated, array_at, compiled, copy, inlined, release, stream, stream_ends
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, record_at, row_of, shared_record_at
from quant.kernels.region import Block
from quant.kernels.threads import Job, Work
from quant.kernels.vectors import INT8, INT16, INT32, INT64, part, transposed
from quant.runs import CACHED, STAGE, STAGE_SIZE, copy_run, flush, space_for

_MOST_ROWS_MARKED = 1 << 20  # of which one byte each is remembered
_PAGE = 4096
_LONG = 128  # bytes of a unit that is not gathered
_SMALL_TILE, _TILE = 1 << 14, 1 << 16  # bytes of a tile of a transposition: gathered in the L1 cache, or straight


class Walk(NamedTuple):
    """Unit sizes in bytes.

    convert  the address of the conversion; 0: units are copied
    after    that of another one, for the units after the whole fours of a row of dst; 0: there is none
    streams  the rows of dst, which are long and have no gaps, are stored past the caches
    """

    src: Side
    dst: Side
    src_unit: int
    dst_unit: int
    convert: int
    after: int
    streams: int


@compiled
def walk(p, begin, end, stage):
    """A unit is one unit of the logical order, an element or a block, moved from side src to side dst. What is stored
    past the caches is assembled in a stage of STAGE_SIZE bytes, unless it is copied unchanged."""
    of = record_at(p, Walk)
    src, dst, streams, src_unit, dst_unit = of.src, of.dst, of.streams, of.src_unit, of.dst_unit
    whole = streams and of.convert == 0 and src.nb[0] == src_unit and src.ne[0] * src_unit >= STAGE
    s0, s1, s2, s3 = locate(src, begin)
    d0, d1, d2, d3 = locate(dst, begin)
    src_row = row_address(src, s1, s2, s3)
    dst_row = row_address(dst, d1, d2, d3)
    filled, target = types.int64(0), dst_row + d0 * dst.nb[0]
    unit = begin
    while unit < end:
        count = min(end - unit, src.ne[0] - s0, dst.ne[0] - d0)
        convert = of.convert
        if of.after:
            fours = dst.ne[0] - dst.ne[0] % 4
            if d0 < fours:
                count = min(count, fours - d0)
            else:
                convert = of.after
        x = src_row + s0 * src.nb[0]
        y = dst_row + d0 * dst.nb[0]
        if whole:
            stream(x, y, count * dst_unit)
        else:
            if streams:
                count = min(count, space_for(dst_unit, filled))
                y = stage + filled
                filled += count * dst_unit
            if convert:
                convert_run(
                    convert, x, src.nb[0], src.packed, src.n_packed, y, dst.nb[0], dst.packed, dst.n_packed, count
                )
            else:
                copy_run(src_unit, x, src.nb[0], y, dst.nb[0], count)
        unit += count
        s0 += count
        d0 += count
        row_ends = d0 == dst.ne[0] or unit == end
        if filled and (row_ends or space_for(dst_unit, filled) == 0):
            filled, target = flush(stage, filled, target, row_ends)
        if unit < end:
            if s0 == src.ne[0]:
                s0 = 0
                s1, s2, s3 = next_row(src, s1, s2, s3)
                src_row = row_address(src, s1, s2, s3)
            if d0 == dst.ne[0]:
                d0 = 0
                d1, d2, d3 = next_row(dst, d1, d2, d3)
                dst_row = row_address(dst, d1, d2, d3)
                target = dst_row
    if streams:
        stream_ends()
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


class Transpose(NamedTuple):
    """A unit of either side is per_unit adjacent elements; sizes in bytes. A tile has tile1 units of src, side by side,
    at each of tile0 places in dimension 0. convert: as of `Walk`."""

    src: Side
    dst: Side
    src_unit: int
    dst_unit: int
    convert: int
    streams: int
    per_unit: int
    tile0: int
    tile1: int


@compiled
def transpose(p, begin, end, rows):
    """A unit is a tile of two sides of the same ne: src has no gaps in dimension 1, dst none in dimension 0.

    A tile is gathered in the L1 cache, as `rows`, so that each side is accessed a whole cache line at a time.
    """
    of = record_at(p, Transpose)
    src, dst, per_unit, tile0, tile1, streams = of.src, of.dst, of.per_unit, of.tile0, of.tile1, of.streams
    src_unit, dst_unit, convert = of.src_unit, of.dst_unit, of.convert
    step = tile0 * src_unit
    stage = rows + tile1 * step
    n0, n1 = -(-src.ne[0] // tile0), -(-src.ne[1] // tile1)
    for tile in range(begin, end):
        i1 = tile % n1 * tile1
        i0 = tile // n1 % n0 * tile0
        i2, i3 = tile // n1 // n0 % src.ne[2], tile // n1 // n0 // src.ne[2]
        count0, count1 = min(tile0, src.ne[0] - i0), min(tile1, src.ne[1] - i1)
        x = row_address(src, i1, i2, i3) + i0 * src.nb[0]
        if convert == 0 and src_unit >= _LONG:
            for j in range(count1):
                y = row_address(dst, i1 + j, i2, i3) + i0 * dst_unit
                for i in range(count0):
                    unit = x + i * src.nb[0] + j * src_unit
                    if streams:
                        stream(unit, y + i * dst_unit, src_unit)
                    else:
                        copy(unit, y + i * dst_unit, src_unit)
            continue
        if src_unit == 4:
            _gather(_turn_32_bit, 8, types.uint32, 4, x, src.nb[0], count0, count1, rows, step)
        elif src_unit == 2:
            _gather(_turn_16_bit, 16, types.uint16, 2, x, src.nb[0], count0, count1, rows, step)
        elif src_unit == 8:
            _gather(_turn_64_bit, 8, types.uint64, 8, x, src.nb[0], count0, count1, rows, step)
        elif src_unit == 1:
            _gather(_turn_8_bit, 16, types.uint8, 1, x, src.nb[0], count0, count1, rows, step)
        else:
            for i in range(count0):
                for j in range(count1):
                    copy(x + i * src.nb[0] + j * src_unit, rows + j * step + i * src_unit, src_unit)
        for j in range(count1):
            x = rows + j * step
            y = row_address(dst, i1 + j, i2, i3) + i0 * dst_unit
            if convert:
                z = stage if streams else y
                convert_run(convert, x, src_unit // per_unit, 0, 0, z, dst_unit // per_unit, 0, 0, count0 * per_unit)
                x = stage
            if streams:
                stream(x, y, count0 * dst_unit)
            elif convert == 0:
                copy(x, y, count0 * dst_unit)
    if streams:
        stream_ends()
    return 0


class Repeat(NamedTuple):
    """Sizes of rows in bytes."""

    src: Place
    src_row: int
    src_ne: Dims
    dst: Place
    dst_row: int
    dst_ne: Dims


@compiled
def repeat(p, begin, end, scratch):
    """A unit is a row of dst, in which a row of src is repeated."""
    of = record_at(p, Repeat)
    src, dst, src_ne, dst_ne, dst_row = of.src, of.dst, of.src_ne, of.dst_ne, of.dst_row
    for index in range(begin, end):
        i1, i2, i3 = index % dst_ne[1], index // dst_ne[1] % dst_ne[2], index // dst_ne[1] // dst_ne[2]
        x = row_of(src, i1 % src_ne[1], i2 % src_ne[2], i3 % src_ne[3])
        y = row_of(dst, i1, i2, i3)
        copy(x, y, of.src_row)
        filled = of.src_row
        while filled < dst_row:
            count = min(filled, dst_row - filled)
            copy(y, y + filled, count)
            filled += count
    return 0


@inlined
def _first_bad_id(side):
    where = 0
    for i3 in range(side.ids.ne[1]):
        for i2 in range(side.ids.ne[0]):
            for i1 in range(side.ne[1]):
                row = row_id(side, i1, i2, i3)
                if row < 0 or row >= side.ids.n_rows:
                    return where
                where += 1
    return -1


@inlined
def _all_differ(side):
    """Whether no id occurs twice in a matrix; also False if finding out would take long."""
    n_rows = side.ids.n_rows
    for i3 in range(side.ids.ne[1]):
        for i2 in range(side.ids.ne[0]):
            last, i1 = types.int64(-1), 0
            while i1 < side.ne[1] and row_id(side, i1, i2, i3) > last:
                last = row_id(side, i1, i2, i3)
                i1 += 1
            if i1 == side.ne[1]:
                continue
            if n_rows > _MOST_ROWS_MARKED:
                return False
            memory = allocated(n_rows)
            seen, differ = array_at(memory, types.uint8, n_rows), True
            seen[:] = 0
            for i1 in range(side.ne[1]):
                row = row_id(side, i1, i2, i3)
                differ = differ and seen[row] == 0
                seen[row] = 1
            release(memory)
            if not differ:
                return False
    return True


class CheckIds(NamedTuple):
    """work, parts: a work that writes rows by these ids, and the most parts that it may be split into; 0: none."""

    side: Side
    work: int = 0
    parts: int = 1


@compiled
def check_ids(p, begin, end, scratch):
    """There is one unit. Returns 1 + the logical index of a side's first id that names no row; 0 if all name one.

    A work that writes rows by these ids is split only if no row is written twice, so that of two the last one stays.
    """
    of = record_at(p, CheckIds)
    bad = _first_bad_id(of.side)
    if bad >= 0:
        return bad + 1
    if of.work:
        shared_record_at(of.work, Block).parts = of.parts if of.parts == 1 or _all_differ(of.side) else 1
    return 0


def _side(tensor: Tensor, ne: Dims, unit: int, ids: Tensor | None) -> Side:
    """A tensor as a side of the walk over logical dimensions ne, in units of `unit` elements."""
    step = tensor.nb[0] * (unit // tensor.codec.block_size)
    side = side_at(tensor.address, (ne[0] // unit, *ne[1:]), (step, *tensor.nb[1:]), ids, tensor.ne[1])
    if tensor.packed is None:
        return side
    return side._replace(packed=tensor.packed.address, n_packed=tensor.packed.n_blocks)


def bind_move(
    dst: Tensor,
    src: Tensor,
    src_ids: Tensor | None = None,
    dst_ids: Tensor | None = None,
    numerics: Numerics = PLAIN,
) -> Job | None:
    """The call that moves src to dst, reading or writing rows by ids; None if a type has no compiled run.

    numerics  whose codecs and rounding are used
    """
    convert = after = 0
    if src.type != dst.type or src.packed is not None or dst.packed is not None:
        in_fours = dst_ids is not None and dst.type == "f16" and numerics.rounding == "simd"
        found = conversion(src.codec.run, F16_FOURS if in_fours else dst.codec.run, numerics.rounding)
        if found is None or (dst.type in numerics.bound and src.type != dst.type):
            return None
        convert = found.address
        rest = conversion(src.codec.run, F16, numerics.rounding) if in_fours else None
        after = 0 if rest is None else rest.address
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
    streams = bool(large and target.ne[0] * dst_unit >= STAGE and target.nb[0] == dst_unit and not target.n_packed)
    if src_ids is None and dst_ids is None:
        turned = _turned(dst, src) if unit == 1 else None
        if turned is not None:
            sides, per_unit = turned
            tile0, tile1 = _tile(src_unit * per_unit)
            units = src_unit * per_unit, dst_unit * per_unit
            of = Transpose(*sides, *units, convert, large, per_unit, tile0, tile1)
            n0, n1, n2, n3 = of.src.ne
            n_tiles, scratch = -(-n0 // tile0) * -(-n1 // tile1) * n2 * n3, tile0 * (tile1 * of.src_unit + of.dst_unit)
            return Job(Work(transpose, of, n_tiles, n_bytes, scratch=scratch))
    stage = STAGE_SIZE if streams else 0
    move = Work(
        walk, Walk(source, target, src_unit, dst_unit, convert, after, streams), n_units, n_bytes, scratch=stage
    )
    if src_ids is not None:
        return Job(_check(source, src_ids), move)
    if dst_ids is not None:
        return Job(_check(target, dst_ids, move), move)
    return Job(move)


def bind_repeat(dst: Tensor, src: Tensor) -> Call:
    """The call that fills dst with src, repeated in each dimension; the rows of both have no gaps."""
    src_row, dst_row = (tensor.ne[0] * tensor.codec.block_bytes for tensor in (src, dst))
    of = Repeat(src.place, src_row, src.ne, dst.place, dst_row, dst.ne)
    n_rows = dst.ne[1] * dst.ne[2] * dst.ne[3]
    return Job(Work(repeat, of, n_rows, n_rows * dst_row, keep=(dst, src)))


def _check(side: Side, ids: Tensor, move: Work | None = None) -> Work:
    """The check of a side's ids, by which `move` writes."""
    of = CheckIds(side) if move is None else CheckIds(side, move.address, move.most_parts)
    return Work(check_ids, of, 1, keep=move, failed=lambda status: bad_id(ids, status - 1, side.ids.n_rows))


def ids_check(ids: Tensor, n_rows: int) -> Work:
    """The check that one or several matrices of ids name only rows below n_rows. Raises KernelError for the first other
    id."""
    return _check(side_at(0, (1, ids.ne[0], 1, 1), (0, 0, 0, 0), ids, n_rows), ids)


def _tile(unit_bytes: int) -> tuple[int, int]:
    """Units of a tile in dimensions 0 and 1: a cache line of single elements side by side, a page of longer runs."""
    beside = LINE if unit_bytes <= 8 else _PAGE
    tile1 = max(1, beside // unit_bytes)
    return max(1, (_TILE if unit_bytes >= _LONG else _SMALL_TILE) // (tile1 * unit_bytes)), tile1


def _turned(dst: Tensor, src: Tensor) -> tuple[tuple[Side, Side], int] | None:
    """Both as the sides of `transpose`, with their dimensions in its order, and the elements of a unit; None if it
    is not a transposition."""
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
    source, target = (
        Side(x.address, padded([x.ne[i] for i in order], 1), padded([x.nb[i] for i in order], 0)) for x in (src, dst)
    )
    return (source, target), per_unit


def _dense_axis(tensor: Tensor, axes: list[int], per_unit: int) -> int | None:
    """The one of some dimensions in which units of per_unit elements are adjacent."""
    return next((i for i in axes if tensor.nb[i] == per_unit * tensor.codec.block_bytes), None)


def _flat_if(tensor: Tensor, unit: int) -> Dims:
    """ne, or one dimension if rows are not whole units: q -> f32 into a contiguous tensor of any shape."""
    return tensor.ne if tensor.ne[0] % unit == 0 else (tensor.n_elements, 1, 1, 1)


def _element_bytes(tensor: Tensor) -> float:
    return tensor.codec.block_bytes / tensor.codec.block_size


def make_ready() -> None:
    """Compiles the kernels of this module, or loads them: once, and not in the middle of a graph."""
    for kernel in (walk, transpose, check_ids):
        _ = kernel.address


def bad_id(ids: Tensor, where: int, n_rows: int) -> KernelError:
    """The error for the id at `where`, in logical order, that does not name one of n_rows rows."""
    i0, rest = where % ids.ne[0], where // ids.ne[0]
    i1, i2 = rest % ids.ne[1], rest // ids.ne[1]
    value = int(ids.view()[0, i2, i1, i0])
    return KernelError(f"row id {value} at {ids.name or 'ids'}[{i2}, {i1}, {i0}] is outside 0..{n_rows - 1}")
