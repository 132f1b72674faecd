"""Passes over the rows of a problem: compiled loops for sparse rows, BLAS for dense ones.

row_kernels     loops over CSR rows: margins, gradient, Hessian products, Gram matrix
softmax         the same for several classes
rows            Rows: one block of rows in memory, sparse or dense, and its threads
"""
