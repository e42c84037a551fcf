"""Operators on NumPy arrays, each with the interface of the document that asks for it; `ops` holds ggml's own nodes."""
