"""The compiler kit: numba and LLVM compile kernels, and threads run them. It knows no ggml type."""
