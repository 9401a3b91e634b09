"""Products over segments of rows: each expert's rows with its own matrix (contract 5, 7).

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
    """(expert, start, stop) of every expert that has rows; reads the E+1 offsets to the host."""
    bounds = [int(bound) for bound in backend.to_numpy(offsets)]
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            yield expert, start, stop


class ProductsStage(Operations[F, I, L], Protocol[F, I, L]):
    """The three grouped products."""

    def grouped_matmul(
        self,
        x_RK: F,
        weight_ENK: F,
        offsets: I,
        /,
        *,
        dtype: DType,
        strategy: ExpertStrategy,
    ) -> F:
        """Each expert's rows times its matrix transposed: [R, N], summed in C, rounded to dtype."""
        compute = self.dtype(weight_ENK).compute
        products: list[F] = []
        for expert, start, stop in segments(self, offsets):
            x: F = x_RK[start:stop, :]
            weight_NK: F = weight_ENK[expert, :, :]
            weight_KN = self.transpose(self.cast(weight_NK, compute))
            product = self.matmul(self.cast(x, compute), weight_KN)
            products.append(self.cast(product, dtype))
        if not products:
            return self.full((0, self.shape(weight_ENK)[1]), 0.0, dtype)
        return self.concat(products)

    def grouped_matmul_transposed(
        self,
        x_RN: F,
        weight_ENK: F,
        offsets: I,
        /,
        *,
        dtype: DType,
        strategy: ExpertStrategy,
    ) -> F:
        """Each expert's rows times its matrix: [R, K], summed in C, rounded to dtype."""
        compute = self.dtype(weight_ENK).compute
        products: list[F] = []
        for expert, start, stop in segments(self, offsets):
            x: F = x_RN[start:stop, :]
            weight_NK: F = weight_ENK[expert, :, :]
            product = self.matmul(self.cast(x, compute), self.cast(weight_NK, compute))
            products.append(self.cast(product, dtype))
        if not products:
            return self.full((0, self.shape(weight_ENK)[2]), 0.0, dtype)
        return self.concat(products)

    def grouped_weight_gradient(
        self,
        dy_RN: F,
        x_RK: F,
        offsets: I,
        /,
        *,
        dtype: DType,
        strategy: ExpertStrategy,
    ) -> F:
        """Sum over each expert's rows of dy times x: [E, N, K] in the compute type `dtype`.

        An expert with no rows has an exactly zero slab.
        """
        rows_of = {expert: (start, stop) for expert, start, stop in segments(self, offsets)}
        shape = (1, self.shape(dy_RN)[1], self.shape(x_RK)[1])
        zero = self.full(shape, 0.0, dtype)
        slabs: list[F] = []
        for expert in range(self.shape(offsets)[0] - 1):
            if expert not in rows_of:
                slabs.append(zero)
                continue
            start, stop = rows_of[expert]
            dy: F = dy_RN[start:stop, :]
            x: F = x_RK[start:stop, :]
            slab = self.matmul(self.transpose(self.cast(dy, dtype)), self.cast(x, dtype))
            slabs.append(self.reshape(slab, shape))
        return self.concat(slabs)
