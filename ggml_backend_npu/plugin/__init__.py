"""A backend as ggml sees it: tables of callbacks, and nodes on any of ggml's devices."""
