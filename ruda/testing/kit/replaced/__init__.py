"""Kernels beside the written bodies they replace."""
