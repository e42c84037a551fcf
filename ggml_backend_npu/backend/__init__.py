"""A backend: its ops, options, fusions and plans."""
