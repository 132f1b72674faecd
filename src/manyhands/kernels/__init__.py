"""Compiled loops: how numba compiles and caches them, processor instructions, codec kernels."""
