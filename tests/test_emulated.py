"""The command that runs the project on an emulated machine: what needs no emulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools import emulated


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([(0, "a\n")], True),
        ([(1, "a\n")], False),
        ([(0, "a\n"), (0, "a\n")], True),
        ([(0, "a\n"), (0, "b\n")], False),
        ([(0, "a\n"), (2, "a\n")], False),
    ],
)
def test_a_step_succeeds_if_all_end_with_0_and_print_the_same(results: list[tuple[int, str]], expected: bool) -> None:
    left = iter(results)

    def run(command: Sequence[str]) -> tuple[int, str]:
        return next(left)

    assert emulated.succeeds([["run"]] * len(results), run) is expected


def test_a_process_of_the_machine_has_its_own_settings_and_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_CORETYPE", "PYTHONPATH", "LLAMA_CPP_LIB_PATH", "NUMBA_DISABLE_JIT"):
        monkeypatch.setenv(name, "this one's")
    found = emulated.environment_of(Path("/machine"), "neoverse-n1")
    assert "this one's" not in found.values()
    assert found["QEMU_CPU"] == found["NUMBA_CPU_NAME"] == "neoverse-n1"
    assert found["XDG_CACHE_HOME"] == "/machine/cache"


def test_the_machine_takes_the_checkout_that_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries, packages = tmp_path / "root/usr/bin", tmp_path / "environment/lib/python3.11/site-packages"
    binaries.mkdir(parents=True)
    (binaries / "python3").symlink_to("python3.11")
    installed: list[Path] = []

    def run(command: list[str | Path]) -> None:
        target, checkout = Path(command[command.index("--target") + 1]), Path(command[-1])
        assert target == packages
        written = target / "ggml_backend_npu-0.1.0.dist-info"
        written.mkdir(parents=True, exist_ok=True)
        (written / "METADATA").write_text("Name: ggml-backend-npu\nVersion: 0.1.0\n")
        (written / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": checkout.as_uri()}))
        installed.append(checkout)

    monkeypatch.setattr("graph_runner.tools.suites._run", run)
    first, second = Path("/first"), Path("/second")
    for checkout in (first, first, second, second, first):
        monkeypatch.setattr(emulated, "ROOT", checkout)
        emulated._take_checkout(tmp_path)
    assert installed == [first, second, first]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["aarch64", "tinny"], "no step 'tinny'; there are: quant"),
        (["aarch64"], "no qemu-aarch64: apt-get install "),
        (["aarch64", "--cpu", "neoverse-n1", "tiny"], "no qemu-aarch64: apt-get install "),
    ],
)
def test_a_mistake_is_refused_in_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["emulated.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        emulated.main()
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_the_workflow_runs_the_same_movers() -> None:
    workflow = Path(__file__).parents[1] / "examples" / "aarch64.yml"
    assert f"ggml-npu test --ops {emulated.MOVERS}\n" in workflow.read_text()
