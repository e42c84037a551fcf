"""A ggml in another process: it computes nodes, and runs a model."""
