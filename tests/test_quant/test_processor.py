"""How many threads there are by default: no more than the process may use at once. How large the last cache is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quant.kernels import processor
from quant.kernels.processor import last_cache, processors, quotas

ROOT = Path(__file__).resolve().parents[2]
V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 25 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
WITHOUT = "34 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
INSIDE = "30 25 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"

# mounts, /proc/self/cgroup, files, the quotas that are found
TREES: dict[str, tuple[str, str, dict[str, str], list[float]]] = {
    "version 2": (V2, "0::/a/b", {"a/b/cpu.max": "150000 100000"}, [1.5]),
    "version 2, a group above": (V2, "0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, [0.5]),
    "version 2, both": (V2, "0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "200000 100000"}, [2.0, 3.0]),
    "version 2, the top": (V2, "0::/", {"cpu.max": "100000 100000"}, [1.0]),
    "version 2, no limit": (V2, "0::/a", {"a/cpu.max": "max 100000"}, []),
    "version 2, without the file": (V2, "0::/a", {}, []),
    "version 2, inside": (INSIDE, "0::/docker/abc", {"cpu.max": "200000 100000"}, [2.0]),
    "version 2, elsewhere": (INSIDE, "0::/../other", {"cpu.max": "200000 100000"}, [2.0]),
    "version 1": (
        f"{WITHOUT}\n{V1}",
        "4:memory:/m\n3:cpu,cpuacct:/c\n0::/",
        {"cpu,cpuacct/c/cpu.cfs_quota_us": "250000", "cpu,cpuacct/c/cpu.cfs_period_us": "100000"},
        [2.5],
    ),
    "version 1, no limit": (
        V1, "3:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, [],
    ),
    "not a number": (V2, "0::/", {"cpu.max": "many 100000"}, []),
    "nothing": ("", "", {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_quotas_of_cgroups(tmp_path: Path, name: str) -> None:
    mounts, groups, files, expected = TREES[name]
    texts = {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
    texts |= {f"sys/fs/cgroup/{file}": text for file, text in files.items()}
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    assert [*quotas(tmp_path)] == expected


def test_without_proc_there_is_no_quota(tmp_path: Path) -> None:
    assert [*quotas(tmp_path)] == []


@pytest.mark.parametrize(("quota", "expected"), [([], 4), ([1.5], 2), ([0.1], 1), ([8.0, 3.0], 3)])
def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch, quota: list[float], expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6})
    monkeypatch.setattr("quant.kernels.processor.quotas", lambda: iter(quota))
    assert processors.__wrapped__() == expected


SAYS = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from graph_runner.base.limits import MOST_THREADS
from graph_runner.bench.measure import cores
from quant.kernels.threads import POOL
print(MOST_THREADS, cores(), POOL.n_threads)
"""


def test_a_process_with_one_processor_has_one_thread() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GGML_NPU_THREADS"}
    done = subprocess.run([sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "4 1 1\n", done.stderr


def test_processors_are_counted_in_one_place() -> None:
    found = [
        str(path.relative_to(ROOT))
        for package in ("quant", "ggml_backend_npu", "graph_runner")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"cpu_count|sched_getaffinity", path.read_text())
    ]
    assert found == ["quant/kernels/processor.py"]


@pytest.mark.parametrize(("text", "expected"), [("32768K\n", 32 << 20), ("much\n", 0), (None, 0)])
def test_the_last_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int) -> None:
    path = tmp_path / "size"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(processor, "LAST_CACHE", path)
    assert last_cache() == expected
