"""A device as one class, its memory, and it as a backend."""
