"""The ggml of this process: found, checked, read."""
