"""What a user can cause, of all packages: one base class, which a command tells in one line."""

from __future__ import annotations


class UserError(Exception):
    """What a user gave cannot be used: one line that says what, with its value, and why."""
