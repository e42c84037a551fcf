"""A profile of the user's own, as TOML. An error names the key and its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ggml_backend_npu.ggml import lib
from ggml_backend_npu.profiles.clock import Clock
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import ANY, ROLES, Profile, ProfileError, Rule, one_of
from ggml_backend_npu.user_texts import TextError, read_text, read_toml
from quant import type_names

Keys = tuple[str | int, ...]

_TEXTS = ("name", "description", "source", "base")
_KEYS = (*_TEXTS, "ops", "op", "clock", "host")
_SPEEDS = ("memory", "bus", "launch")
_LAYOUTS = ("contiguous", "rows", "where")
_MOST = 1e300  # of a speed, which a float can hold


def read(path: Path) -> Profile:
    """The profile in a TOML file.

    name, description, source  texts
    base       a profile whose ops it has too, except those that it names itself
    ops        ops that it takes in any form. A profile with a clock, but without base, ops and op, takes all ops
    [op.NAME]  a rule for an op, or several as [[op.NAME]]: the types of dst, src0, ..., and Rule's other fields
    [clock]    how fast it is: the fields of Clock; [host]: how fast the CPU beside it is. Both or neither

    Raises ProfileError for a file that cannot be read or is not a profile.
    """
    try:
        text = read_text(path)
        return _profile(read_toml(text), path)
    except TextError as error:
        raise ProfileError(str(error)) from None
    except UnicodeDecodeError:
        raise ProfileError("is not text") from None
    except ValueError as error:
        raise ProfileError(_syntax_error(text, str(error))) from None
    except _KeyError as error:
        raise ProfileError(f"line {_line(text, error.keys, error.word)}: {error}", error.word) from None


class _KeyError(ProfileError):
    """Something is wrong at a key, given by the keys that lead to it."""

    def __init__(self, keys: Keys, message: str, word: str = "") -> None:
        super().__init__(message, word or str(keys[-1]))
        self.keys = keys


def _profile(data: dict[str, Any], path: Path) -> Profile:
    for key, value in data.items():
        _known((key,), "key", key, _KEYS)
        if key in _TEXTS and not isinstance(value, str):
            raise _KeyError((key,), f"{key}: must be a text")
    base = data.get("base")
    if base is not None:
        _known(("base",), "base", base, [name for name, profile in PROFILES.items() if profile.ops is not None])
    taken = _words(("ops",), data.get("ops", []))
    tables = data.get("op", {})
    if not isinstance(tables, dict):
        raise _KeyError(("op",), "op: must be tables [op.NAME]")
    known = sorted(lib.ggml().op_names)
    for name in taken:
        _known(("ops",), "op", name, known)
    for name in tables:
        _known(("op", name), "op", name, known)
    ops = dict(PROFILES[base].ops or {}) if base else {}
    ops |= dict.fromkeys(taken, ANY)
    ops |= {name: _rules(("op", name), rules) for name, rules in tables.items()}
    clock = _clocks(data)
    says_ops = clock is None or not data.keys().isdisjoint(("base", "ops", "op"))
    texts = data.get("name", path.stem), data.get("description", ""), data.get("source", str(path))
    return Profile(*texts, ops if says_ops else None, clock)


def _clocks(data: dict[str, Any]) -> tuple[Clock, Clock] | None:
    """The device's clock and the host's; None where the file has neither."""
    given = [key for key in ("clock", "host") if key in data]
    if not given:
        return None
    if len(given) == 1:
        raise _KeyError((given[0],), f"{given[0]}: needs [{'host' if given[0] == 'clock' else 'clock'}] beside it")
    return _clock(("clock",), data["clock"]), _clock(("host",), data["host"])


def _clock(keys: Keys, table: Any) -> Clock:
    if not isinstance(table, dict):
        raise _KeyError(keys, f"{keys[-1]}: must be a table [{keys[-1]}]")
    rates = table.get("operations", {})
    if not isinstance(rates, dict):
        raise _KeyError((*keys, "operations"), "operations: must be a table of numbers, such as { f16 = 1e12 }")
    ops = sorted(lib.ggml().op_names)
    for key, value in table.items():
        _known((*keys, key), "key", key, (*_SPEEDS, "operations"))
        if key in _SPEEDS:
            _positive((*keys, key), value, zero=key == "launch")
    for name, value in rates.items():
        at = (*keys, "operations", name)
        if name not in type_names():
            _known(at, "type or op", name, (*ops, "elements"))
        _positive(at, value)
    if "memory" not in table:
        raise _KeyError(keys, f"{keys[-1]}: needs memory, in bytes a second")
    return Clock(**{**table, "operations": rates})


def _positive(keys: Keys, value: Any, *, zero: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < _MOST or (zero and value == 0)):
        raise _KeyError(keys, f"{keys[-1]}={value!r}: must be a number above zero")


def _rules(keys: Keys, rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, dict):
        return (_rule(keys, rules),)
    if isinstance(rules, list) and all(isinstance(rule, dict) for rule in rules):
        return tuple(_rule((*keys, i), rule) for i, rule in enumerate(rules))
    raise _KeyError(keys, f"{keys[-1]}: must be a table [op.{keys[-1]}]")


def _rule(keys: Keys, table: dict[str, Any]) -> Rule:
    rule = Rule()
    for key, value in table.items():
        at = (*keys, key)
        _known(at, "key", key, (*ROLES, *_LAYOUTS))
        words = _words(at, value)
        try:
            rule = replace(rule, **({key: words} if key in _LAYOUTS else {"types": {**rule.types, key: words}}))
            rule.check_parameters(str(keys[1]))
        except ProfileError as error:
            raise _KeyError(at, f"{key}: {error}", error.word) from None
    return rule


def _words(keys: Keys, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _KeyError(keys, f'{keys[-1]}: must be a list of texts, such as ["..."]')
    return tuple(value)


def _known(keys: Keys, what: str, word: str, known: Sequence[str]) -> None:
    try:
        one_of(what, word, known)
    except ProfileError as error:
        raise _KeyError(keys, str(error), word) from None


def _syntax_error(text: str, message: str) -> str:
    lines = text.splitlines() or [""]
    found = re.search(r" \(at line (\d+), column \d+\)", message)
    line = int(found[1]) if found else len(lines)
    what = message[: found.start()] if found else message
    return f"line {line}: {what}: {lines[line - 1].strip()}"


def _line(text: str, keys: Keys, word: str) -> int:
    """The line of the word in the statement that sets a key. TOML libraries do not tell it, but what the lines before
    and up to a statement's end parse to does."""
    lines = text.splitlines()
    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    for at in (n for n, line in enumerate(lines) if whole.search(line)):
        before = next(filter(None, (_parsed(lines[:end]) for end in range(at, 0, -1))), {})
        after = next(filter(None, (_parsed(lines[:end]) for end in range(at + 1, len(lines) + 1))), {})
        if _has(after, keys) and not _has(before, keys):
            return at + 1
    return 1


def _parsed(lines: list[str]) -> dict[str, Any]:
    """What lines set; nothing if they end within a statement."""
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return {}


def _has(data: Any, keys: Keys) -> bool:
    for key in keys:
        if not (key in data if isinstance(data, dict) else isinstance(key, int) and key < len(data)):
            return False
        data = data[key]
    return True
