"""Errors that a user can cause, in all packages: one base class, which commands print as one line."""

from __future__ import annotations


class UserError(Exception):
    """Something that a user gave cannot be used: one line that says what, with its value, and why."""
