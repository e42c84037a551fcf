"""Ops that do more than move data, on shapes of real models: the same node on the NPU and on ggml's CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import quant
from ggml_backend_npu.plugin.build import Builder
from graph_runner.bench.measure import Measurement, against, in_turns
from graph_runner.bench.nodes import Run, on_both_devices

_FAR = 5e-4  # NMSE that test-backend-ops allows a convolution
_CALLS = 9  # so that most of a turn's calls find in the cache what the ones before left there

Tensor = tuple[str, tuple[int, ...]]  # type, ne


@dataclass(frozen=True)
class Case:
    """One node to measure.

    group      the heading that it is shown under
    what       op and shape
    function   ggml's function that makes the node, without ggml_
    arguments  its arguments: a tensor as its type and ne, numbers as they are
    """

    group: str
    what: str
    function: str
    arguments: tuple[Tensor | int | float, ...]

    def build(self, build: Builder) -> int:
        """Makes the node and its sources."""
        return build.op(
            self.function, *(build.tensor(*given) if isinstance(given, tuple) else given for given in self.arguments)
        )


def _f32(*ne: int) -> Tensor:
    return "f32", ne


def _f16(*ne: int) -> Tensor:
    return "f16", ne


_UNPADDED, _SAME = (1, 1, 0, 0, 1, 1), (1, 1, 1, 1, 1, 1)  # stride, padding and dilation, each in two dimensions
_F16 = 1  # GGML_TYPE_F16
_MAX, _NEAREST, _BILINEAR, _BICUBIC = 0, 0, 1, 2  # ggml_op_pool, ggml_scale_mode


def _cases() -> Iterator[Case]:
    image, small = _f32(64, 64, 128), _f32(32, 32, 512)
    for name, of in (("f32", _f32), ("f16", _f16)):
        group = f"convolutions, {name}"
        yield Case(group, "CONV_2D 3x3, 128 -> 128, 64x64", "conv_2d_direct", (of(3, 3, 128, 128), image, *_SAME))
        yield Case(group, "CONV_2D 1x1, 512 -> 512, 32x32", "conv_2d_direct", (of(1, 1, 512, 512), small, *_UNPADDED))
        yield Case(group, "CONV_2D 14x14 patches, 3 -> 1024, 336x336", "conv_2d_direct",
                   (of(14, 14, 3, 1024), _f32(336, 336, 3), 14, 14, 0, 0, 1, 1))  # fmt: skip
        yield Case(group, "CONV_2D_DW 3x3, 192, 112x112", "conv_2d_dw_direct",
                   (of(3, 3, 1, 192), _f32(112, 112, 192), *_SAME))  # fmt: skip
        yield Case(group, "CONV_3D 3x3x3, 16 -> 16, 32x32x16", "conv_3d_direct",
                   (of(3, 3, 3, 256), _f32(32, 32, 16, 16), 1, 1, 1, 1, 1, 1, 1, 1, 1, 16, 1, 16))  # fmt: skip
        yield Case(group, "CONV_TRANSPOSE_1D 16, 512 -> 256, 128", "conv_transpose_1d",
                   (of(16, 256, 512), _f32(128, 512), 8, 0, 1))  # fmt: skip
        yield Case(group, "CONV_TRANSPOSE_2D 2x2, 256 -> 64, 64x64", "conv_transpose_2d_p0",
                   (of(2, 2, 64, 256), _f32(64, 64, 256), 2))  # fmt: skip
    yield Case("images", "IM2COL 3x3, 128, 64x64", "im2col", (_f16(3, 3, 128, 1), image, *_SAME, True, _F16))
    yield Case("images", "IM2COL 3, 80, 3000 frames", "im2col",
               (_f16(3, 80, 512), _f32(3000, 80), 1, 0, 1, 0, 1, 0, False, _F16))  # fmt: skip
    yield Case("images", "IM2COL_3D 3x3x3, 16, 32x32x16", "im2col_3d",
               (_f16(3, 3, 3, 256), _f32(32, 32, 16, 16), 16, 1, 1, 1, 1, 1, 1, 1, 1, 1, _F16))  # fmt: skip
    yield Case("images", "COL2IM_1D 16, 256, 128 frames", "col2im_1d", (_f32(4096, 128), 8, 256, 0))
    yield Case("images", "POOL_2D 2x2, 128, 64x64", "pool_2d", (image, _MAX, 2, 2, 2, 2, 0.0, 0.0))
    for name, mode in (("nearest", _NEAREST), ("bilinear", _BILINEAR), ("bicubic", _BICUBIC)):
        yield Case("images", f"UPSCALE {name}, 128, 64x64 -> 128x128", "interpolate", (image, 128, 128, 128, 1, mode))
    yield Case("images", "GROUP_NORM 32 groups, 128, 64x64", "group_norm", (image, 32, 1e-6))
    yield Case("images", "PAD 128, 64x64 by 1", "pad_ext", (image, 1, 1, 1, 1, 0, 0, 0, 0))
    yield Case("images", "ROLL 128, 64x64", "roll", (image, 3, 5, 0, 0))
    yield Case("images", "PAD_REFLECT_1D 80, 3000 frames", "pad_reflect_1d", (_f32(3000, 80), 200, 200))
    yield Case("images", "WIN_PART 14, 768, 64x64", "win_part", (_f32(768, 64, 64), 14))
    yield Case("images", "WIN_UNPART 14, 768, 64x64", "win_unpart", (_f32(768, 14, 14, 25), 64, 64, 14))
    yield Case("images", "GET_REL_POS 64, 80", "get_rel_pos", (_f16(80, 127), 64, 64))
    yield Case("images", "ADD_REL_POS 64x64 to 64x64", "add_rel_pos",
               (_f32(4096, 4096), _f32(64, 64, 64), _f32(64, 64, 64)))  # fmt: skip
    yield Case("images", "TIMESTEP_EMBEDDING 320, 512 steps", "timestep_embedding", (_f32(512), 320, 10000))
    rows = _f32(4096, 512)
    for name in ("sum", "mean", "sum_rows", "cumsum", "argmax"):
        yield Case("rows", f"{name.upper()} 4096x512", name, (rows,))
    for name, others in (("tri", (0,)), ("diag_mask_inf", (0,)), ("diag_mask_zero", (0,))):
        yield Case("rows", f"{name.upper()} 512x512x8", name, (_f32(512, 512, 8), *others))
    yield Case("rows", "DIAG 512x8", "diag", (_f32(512, 1, 8),))
    yield Case("rows", "ADD 4096x512", "add", (rows, rows))
    yield Case("rows", "MUL 4096x512, 4096", "mul", (rows, _f32(4096)))
    for name in ("abs", "exp", "gelu", "silu", "tanh", "hardswish"):
        yield Case("rows", f"{name.upper()} 4096x512", name, (rows,))
    yield Case("training", "OUT_PROD 1024x512, 1024x512", "out_prod", (_f32(1024, 512), _f32(1024, 512)))
    yield Case("training", "SOFT_MAX_BACK 4096x512", "soft_max_ext_back", (rows, rows, 1.0, 0.0))
    yield Case("training", "RMS_NORM_BACK 4096x512", "rms_norm_back", (rows, rows, 1e-6))
    yield Case("training", "SILU_BACK 4096x512", "silu_back", (rows, rows))
    yield Case("training", "REPEAT_BACK 4096x512 -> 4096x1", "repeat_back", (rows, _f32(4096, 1)))
    yield Case("training", "GET_ROWS_BACK 4096, 512 rows", "get_rows_back", (rows, ("i32", (512,)), _f32(4096, 1024)))
    yield Case("training", "CROSS_ENTROPY_LOSS 32000x256", "cross_entropy_loss", (_f32(32000, 256), _f32(32000, 256)))
    yield Case("training", "CROSS_ENTROPY_LOSS_BACK 32000x256", "cross_entropy_loss_back",
               (_f32(1), _f32(32000, 256), _f32(32000, 256)))  # fmt: skip


CASES = list(_cases())


def bench_ops(*, rounds: int, threads: int, cases: list[Case] = CASES) -> Iterator[Measurement]:
    """Measures each case on both devices, in ms.

    Raises RuntimeError if a node fails or the two results differ by more than ggml's own tests allow.
    """
    for case in cases:
        with on_both_devices(case.what, case.build, threads=threads) as runs:
            _check_close(case.what, runs)
            times = in_turns(runs, rounds, calls=_CALLS, quiet=0)
        yield against(times, case.what, "ms", group=case.group)


def _check_close(what: str, runs: dict[str, Run]) -> None:
    for run in runs.values():
        run()
    npu, cpu = (quant.dequantize(run.output(), run.type).astype(np.float64) for run in runs.values())
    differs = npu != cpu  # infinities may be equal
    error = np.sum((npu[differs] - cpu[differs]) ** 2) / max(
        np.sum(cpu[np.isfinite(cpu)] ** 2), np.finfo(np.float64).tiny
    )
    if not error <= _FAR:
        raise RuntimeError(f"{what}: the NMSE of the NPU to the CPU is {error:.1e}, more than {_FAR:.0e}")
