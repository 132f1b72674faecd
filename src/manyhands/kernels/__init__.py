"""Compiled loops: how numba compiles and caches them, single processor instructions, codec kernels.

numba compiles a kernel when it is first called with new argument types, and writes the machine code
to `__pycache__` beside the kernel's source file. The next process reads it from there. `compile.py`
adds one thing to numba's own check: cached code is valid only while every file of the package that
compiles something is unchanged. So after an edit of a kernel, or of a constant or inlined function
that another file's kernel uses, all kernels compile again by themselves; nothing must be touched or
deleted by hand. A closure is cached under the values that it closes over. Those must be numbers: a
kernel in a closure has another identity in every process, so the closure would never be found.
"""
