"""Products over segments of rows: each expert's rows with its own matrix (contract 5, 7).

One loop over experts serves all three products and every backend: `product` is what a framework may
do better, and the results are written where they belong as they come.

Shapes: R rows, E experts; N, K any two of the widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

from ruda.base.dtypes import DType
from ruda.base.operations import Operations
from ruda.base.strategies import ExpertStrategy
from ruda.base.tensors import F, I, L


def segments(backend: Operations[F, I, L], offsets: I) -> Iterator[tuple[int, int, int]]:
    """(expert, start, stop) of every expert; reads the E+1 offsets to the host."""
    bounds = [int(bound) for bound in backend.to_numpy(offsets)]
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        yield expert, start, stop


class ProductsStage(Operations[F, I, L], Protocol[F, I, L]):
    """The three grouped products, and the one product they are made of."""

    def product(self, a: F, b: F, /, *, dtype: DType, strategy: ExpertStrategy) -> F:
        """The product of two matrices, summed and given in `dtype`, their compute type."""
        return self.matmul(self.cast(a, dtype), self.cast(b, dtype))

    def grouped_matmul(
        self, x_RK: F, weight_ENK: F, offsets: I, /, *, dtype: DType, strategy: ExpertStrategy
    ) -> F:
        """Each expert's rows times its matrix transposed: [R, N], summed in C, rounded to dtype."""
        y_RN = self.empty((self.shape(x_RK)[0], self.shape(weight_ENK)[1]), dtype)
        for expert, start, stop in segments(self, offsets):
            if start < stop:
                x: F = x_RK[start:stop, :]
                weight_NK: F = weight_ENK[expert, :, :]
                weight_KN = self.transpose(weight_NK)
                y = self.product(x, weight_KN, dtype=dtype.compute, strategy=strategy)
                y_RN = self.write_rows(y_RN, start, y)
        return y_RN

    def grouped_matmul_transposed(
        self, x_RN: F, weight_ENK: F, offsets: I, /, *, dtype: DType, strategy: ExpertStrategy
    ) -> F:
        """Each expert's rows times its matrix: [R, K], summed in C, rounded to dtype."""
        y_RK = self.empty((self.shape(x_RN)[0], self.shape(weight_ENK)[2]), dtype)
        for expert, start, stop in segments(self, offsets):
            if start < stop:
                x: F = x_RN[start:stop, :]
                weight_NK: F = weight_ENK[expert, :, :]
                y = self.product(x, weight_NK, dtype=dtype.compute, strategy=strategy)
                y_RK = self.write_rows(y_RK, start, y)
        return y_RK

    def expert_weight_gradient(
        self, dy_RN: F, x_RK: F, offsets: I, /, *, dtype: DType, strategy: ExpertStrategy
    ) -> F:
        """Sum over each expert's rows of dy times x: [E, N, K] in the compute type `dtype`.

        An expert with no rows has an exactly zero slab.
        """
        experts, n, k = self.shape(offsets)[0] - 1, self.shape(dy_RN)[1], self.shape(x_RK)[1]
        rows_K = self.empty((experts * n, k), dtype)
        for expert, start, stop in segments(self, offsets):
            if start < stop:
                dy: F = dy_RN[start:stop, :]
                x: F = x_RK[start:stop, :]
                slab = self.product(self.transpose(dy), x, dtype=dtype, strategy=strategy)
            else:
                slab = self.full((n, k), 0.0, dtype)
            rows_K = self.write_rows(rows_K, expert * n, slab)
        return self.reshape(rows_K, (experts, n, k))
