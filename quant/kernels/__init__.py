"""The compiler kit: what kernels are compiled with, numba and LLVM, and what runs them in threads. It knows no type."""

from quant.kernels import halves  # noqa: F401  (gives LLVM the functions that it calls by name)
