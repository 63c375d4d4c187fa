"""Kernels over raw tensors. They trust their callers: shapes, dtypes and options were checked before."""
