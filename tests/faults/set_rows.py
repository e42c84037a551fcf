"""Faults of SET_ROWS."""

from dataclasses import replace

from kit.diffs import FLASH_ON, QUANTISED
from kit.faults import PACKING, fault

from ggml_backend_npu import Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call


@fault("SET_ROWS", settings=FLASH_ON, says="writes row id + 1 in place of row id")
def set_rows_next_cell(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS with ids off by one."""
    OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1))


@fault("SET_ROWS", settings=FLASH_ON, never=("writes nothing",))
def set_rows_writes_zeros(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS that writes zeros into the right rows."""
    dst.view()[:, :, ids.view().reshape(-1)] = 0


@fault("SET_ROWS", settings=FLASH_ON, never=("writes nothing", "permutes"))
def set_rows_whole_words(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS that leaves out the last elements of a row: a loop over whole words of 48."""
    kept = dst.view()[:, :, ids.view().reshape(-1)].copy()
    OWN["SET_ROWS"].define(dst, src, ids)
    done = dst.ne[0] // 48 * 48
    dst.view()[:, :, ids.view().reshape(-1), done:] = kept[..., done:]


@fault("SET_ROWS", settings=FLASH_ON, never=("writes nothing",))
def set_rows_clears_another_row(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS that clears a row which no id names: a gap between those that it is to write."""
    OWN["SET_ROWS"].define(dst, src, ids)
    dst.view()[:, :, ids.view().max() + 7] = 1


@fault(
    "SET_ROWS", at=lambda node: node.dst.type == "q4_0", settings=QUANTISED, says="swaps the two nibbles of each byte"
)
def set_rows_swaps_nibbles(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS into q4_0 with the two nibbles of each byte swapped."""
    OWN["SET_ROWS"].define(dst, src, ids)
    if dst.type == "q4_0":
        rows = ids.view().reshape(-1)
        blocks = dst.view()[:, :, rows]
        blocks[..., 2:] = blocks[..., 2:] << 4 | blocks[..., 2:] >> 4
        dst.view()[:, :, rows] = blocks


@fault("SET_ROWS", "runs", step=1, settings=FLASH_ON, says="leaves dst as it was")
def set_rows_of_many_tokens(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS that writes nothing where there is one token."""
    if src.ne[1] > 1:
        OWN["SET_ROWS"].define(dst, src, ids)


@fault("SET_ROWS", "packed", settings=QUANTISED, options=PACKING)
def set_rows_not_packed(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """SET_ROWS that writes blocks where what it writes to is packed."""
    OWN["SET_ROWS"].define(dst, src, ids)


@set_rows_not_packed.compiled
def prepare(dst: Tensor, src: Tensor, ids: Tensor) -> Call | None:
    return lambda: OWN["SET_ROWS"].define(replace(dst, packed=None), src, ids)
