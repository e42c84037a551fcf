"""Exit codes of the command that say how it ended, not what it found."""

INTERRUPTED, CLOSED_PIPE = 130, 141
