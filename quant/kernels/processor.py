"""The processor that kernels are compiled for, and how many there are for this process."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import xxhash

from quant.folders import FolderError, kept, kernels_root
from quant.kernels.kept import DamagedError, unsealed, write_sealed

CPUINFO = Path("/proc/cpuinfo")
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_OF_A_KIND = ("vendor", "cpu family", "model", "stepping", "microcode", "flags", "CPU", "Features")  # lines of CPUINFO
_KINDS = "kernels-processors"  # the folder of what LLVM calls each kind


def name() -> str:
    """The processor that kernels are compiled for, by LLVM's name: NUMBA_CPU_NAME, or else this machine's."""
    return os.environ.get("NUMBA_CPU_NAME", _host()[0])


@functools.cache
def features() -> str:
    """The features of that processor as LLVM writes them: NUMBA_CPU_FEATURES, or this machine's, as `follow` said."""
    if (told := os.environ.get("NUMBA_CPU_FEATURES")) is not None:
        return told
    if (named := os.environ.get("NUMBA_CPU_NAME")) is not None:
        return "" if named.lower() == "generic" else _host()[1]
    return ",".join(
        f"-{each[1:]}" if _lanes == 8 and each[1:].startswith("avx512") else each for each in _host()[1].split(",")
    )


def processor_has(*wanted: str) -> bool:
    """Whether the processor that kernels are compiled for has all of these features: "avx512f", ..."""
    return {f"+{feature}" for feature in wanted} <= {*features().split(",")}


def last_cache() -> int:
    """Bytes of the processor's third cache, which its cores share; 0 if Linux does not say."""
    with suppress(OSError, ValueError):
        return int(LAST_CACHE.read_text().strip().removesuffix("K")) << 10
    return 0


def multiplies_unsigned() -> bool:
    """Whether `vectors.Value.plus_fours` takes unsigned bytes (AVX-512 VNNI has no products of signed ones)."""
    return processor_has("avx512vnni", "avx512vl")


def adds_pairs() -> bool:
    """Whether `vectors.Value.plus_fours` is two instructions of AVX2, each of which adds pairs of products."""
    return processor_has("avx2") and not multiplies_unsigned()


def scales_pairs() -> bool:
    """Whether `vectors.Value.plus_fours` multiplies sums of pairs of products by factors."""
    return adds_pairs() or multiplies_unsigned()


def dots_bytes() -> bool:
    """Whether the processor multiplies bytes and adds the products (AVX-512 VNNI, AVX2, an ARM's dot products)."""
    return multiplies_unsigned() or adds_pairs() or processor_has("dotprod")


def computes_with_float16() -> bool:
    """Whether the processor multiplies and adds float16 itself (AVX512-FP16, an ARM's half floats)."""
    return processor_has("avx512fp16") or processor_has("fullfp16")


def target() -> str:
    """The name and the features of the processor that kernels are compiled for, as LLVM writes them."""
    return f"{name()} {features()}"


def release_of(package: str) -> str:
    """What a package of numba's says of its release, without importing it: what is compiled by another one differs."""
    spec = find_spec(package)
    return "" if spec is None or spec.origin is None else Path(spec.origin).with_name("_version.py").read_text()


@functools.cache
def _host() -> tuple[str, str]:
    """The name and the features of this machine's processor. LLVM is asked once on each kind of processor."""
    about = _lines(CPUINFO) if CPUINFO.exists() else []
    first = about[: about.index("")] if "" in about else about
    kind = "\n".join([release_of("llvmlite"), *(line for line in first if line.startswith(_OF_A_KIND))])
    kept_as = xxhash.xxh3_64_hexdigest(kind.encode())
    with suppress(FolderError, OSError, DamagedError, ValueError):
        if first:
            found, has = unsealed(kept(kernels_root() / _KINDS) / kept_as).decode().split(" ")
            return found, has
    from llvmlite import binding  # late: it loads LLVM

    found, has = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    with suppress(FolderError, OSError):
        write_sealed(kept(kernels_root() / _KINDS) / kept_as, f"{found} {has}".encode())
    return found, has


_lanes = 0  # as told by `follow`


def lanes() -> int:
    """How many float32 are added side by side: as `follow` said, else 16 with AVX-512, 4 with NEON, and 8 without."""
    return _lanes or (16 if processor_has("avx512f") else 4 if processor_has("neon") else 8)


def follow(n: int) -> None:
    """From now on n float32 (16, 8 or 4) are added side by side, whatever processor kernels are compiled for.

    With 8, that processor becomes this one without AVX-512, unless a variable tells of another. Kernels that are
    already compiled stay as they are.
    """
    global _lanes
    _lanes = n
    features.cache_clear()


@functools.cache
def processors() -> int:
    """How many processors this process may use at once: those of its affinity, or fewer if the quota of a cgroup
    that it is in allows less time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(ceil(quota) for quota in quotas())]))


def quotas(root: Path = Path("/")) -> Iterator[float]:
    """The processor time per time that each cgroup allows this process, if it limits that: 1.5 is one processor and
    a half. Version 2 says so in cpu.max, version 1 in cpu.cfs_quota_us and cpu.cfs_period_us.

    root  what /proc and /sys lie in
    """
    with suppress(OSError, ValueError, IndexError):
        groups = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
        for line in _lines(root / "proc/self/mountinfo"):
            before, _, after = line.partition(" - ")
            top, mounted = before.split()[3:5]
            kind, _, options = after.split(maxsplit=2)
            is_version_1 = kind == "cgroup" and "cpu" in options.split(",")
            if not is_version_1 and kind != "cgroup2":
                continue
            for _, controllers, group in groups:
                if "cpu" in controllers.split(",") if is_version_1 else controllers == "":
                    yield from _quotas_of(root / mounted.lstrip("/"), os.path.relpath(group, top))


def _quotas_of(mounted: Path, group: str) -> Iterator[float]:
    """The quotas of a cgroup, by its path below the mount, and of those that it is in."""
    folder = mounted if group.startswith("..") else mounted / group
    for each in (folder, *folder.parents):
        if each.is_relative_to(mounted):
            with suppress(OSError, ValueError):
                quota, period = _quota(each)
                if quota > 0 and period > 0:
                    yield quota / period


def _quota(folder: Path) -> tuple[int, int]:
    """The microseconds of processor time that a cgroup has in each period, and that period. Raises OSError, or
    ValueError for "max"."""
    with suppress(FileNotFoundError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="surrogateescape").splitlines()


def announces_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the system says that the processor has AMX; some virtual machines say so and cannot run it."""
    with suppress(OSError):
        return any(line.startswith("flags") and " amx_" in line for line in _lines(cpuinfo))
    return False


def processor_name() -> str:
    """The name of this machine's processor, as /proc/cpuinfo has it; its kind if there is none."""
    lines = _lines(CPUINFO) if CPUINFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
