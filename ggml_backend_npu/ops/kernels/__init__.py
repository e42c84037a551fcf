"""Compiled kernels, and parts of kernels, that ops bind."""
