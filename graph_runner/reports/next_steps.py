"""What to do next about a wrong node: commands that are printed beside it."""

from __future__ import annotations

import shlex

from graph_runner.judging.results import OWN_RUN, NodeResult

_REPEATS = 8  # of the replay of a node that is wrong in its own run alone, where no replay was tried


def next_steps(node: NodeResult, options: dict[str, str]) -> list[str]:
    """Returns what to do next about a wrong node, one line each."""
    lines = []
    command = replay_command(node, options)
    if command is not None:
        lines.append(f"compute it again without the model: {command}")
    elif node.reproducer is not None:
        lines.append(f"computed again without the model it is right each time: {shlex.quote(node.reproducer)}")
    test = test_command(node, options)
    if test is not None:
        lines.append(f"nearest test cases of ggml: {test}")
    return lines


def test_command(node: NodeResult, options: dict[str, str]) -> str | None:
    """Returns the command that runs ggml's nearest test cases with the diff's kernel files and device."""
    if node.test is None or "device" in options:
        return None
    command = shlex.join(["ggml-npu", "test", *_kernel_files(options), *device_file(options)])
    return f"{command} {node.test.removeprefix('test-backend-ops test ')}"


def replay_command(node: NodeResult, options: dict[str, str]) -> str | None:
    """Returns the command that replays a node's reproducer with the diff's kernel files and device: the one that was
    seen to show it wrong, if that was tried. None if none did."""
    if node.reproducer is None or node.repeats == 0:
        return None
    command = ["ggml-npu", "replay", node.reproducer]
    for name in _kernel_files(options):
        command += ["--kernels", name]
    command += [*device_file(options), *_foreign(options)]
    repeats = node.repeats or (_REPEATS if node.wrong_in == OWN_RUN else 1)
    if repeats > 1:
        command += ["--repeat", str(repeats)]
    return shlex.join(command)


def _kernel_files(options: dict[str, str]) -> list[str]:
    return [name.rpartition(" sha256:")[0] for name in options.get("kernels", "").split(", ") if name]


def _foreign(options: dict[str, str]) -> list[str]:
    """Returns the options that name a device of another backend."""
    given = [(name, each) for name in ("device", "backend", "rpc") for each in options.get(name, "").split(", ")]
    return [word for name, each in given if each for word in (f"--{name}", each)]


def device_file(options: dict[str, str]) -> list[str]:
    """Returns the option that names the file of a device of one's own."""
    return ["--device-file", options["device_file"]] if "device_file" in options else []
