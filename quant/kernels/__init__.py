"""The compiler kit: numba and LLVM compile kernels, and threads run them. It knows no ggml type."""

from quant.kernels import halves  # noqa: F401  (gives LLVM the functions that it calls by name)
