"""SwiGLU experts over segments of rows, both ways (contract 5, 7).

Values between products are held in one type, `inner`: the storage type D, so that every step rounds
where the contract marks it, or the compute type C when the caller asked for no roundings. Each step
widens to C, computes, and narrows to `inner` once.

Shapes: R rows, H hidden, I intermediate, E experts; N, K any two of the widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Generic

from ruda.dispatch import Dispatch, row_tokens, row_weights, slot_values
from ruda.dtypes import DType, wider
from ruda.options import (
    CombineGradientStrategy,
    ExpertOptions,
    ExpertsGradientSelection,
    ExpertStrategy,
    Intermediates,
)
from ruda.tensors import F, F_co, I, L
from ruda.weights import sigmoid

if TYPE_CHECKING:
    from ruda.backend import Backend


@dataclass(frozen=True, eq=False)
class Activations(Generic[F_co]):
    """What a forward pass keeps for its backward: g and u, or a alone, or nothing (contract 7)."""

    gate_output: F_co | None = None
    up_output: F_co | None = None
    activation: F_co | None = None


@dataclass(frozen=True, eq=False)
class ExpertGradients(Generic[F_co]):
    """Gradients of the expert stage by row and by expert; `None` is not wanted."""

    rows: F_co | None = None
    weights: F_co | None = None
    gate: F_co | None = None
    up: F_co | None = None
    down: F_co | None = None


def inner_dtype(storage: DType, intermediates: Intermediates) -> DType:
    """The type of the values between the products."""
    return storage if intermediates is Intermediates.STORAGE else storage.compute


def segments(backend: Backend[F, I, L], offsets: I) -> Iterator[tuple[int, int, int]]:
    """(expert, start, stop) of every expert that has rows; reads the E+1 offsets to the host."""
    bounds = [int(bound) for bound in backend.to_numpy(offsets)]
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            yield expert, start, stop


def grouped_matmul(
    backend: Backend[F, I, L],
    x_RK: F,
    weight_ENK: F,
    offsets: I,
    *,
    dtype: DType,
    strategy: ExpertStrategy,
) -> F:
    """Each expert's rows times its matrix transposed: [R, N], summed in C, rounded to dtype."""
    compute = backend.dtype(weight_ENK).compute
    products: list[F] = []
    for expert, start, stop in segments(backend, offsets):
        x: F = x_RK[start:stop, :]
        weight_NK: F = weight_ENK[expert, :, :]
        weight_KN = backend.transpose(backend.cast(weight_NK, compute))
        product = backend.matmul(backend.cast(x, compute), weight_KN)
        products.append(backend.cast(product, dtype))
    if not products:
        return backend.full((0, backend.shape(weight_ENK)[1]), 0.0, dtype)
    return backend.concat(products)


def grouped_matmul_transposed(
    backend: Backend[F, I, L],
    x_RN: F,
    weight_ENK: F,
    offsets: I,
    *,
    dtype: DType,
    strategy: ExpertStrategy,
) -> F:
    """Each expert's rows times its matrix: [R, K], summed in C, rounded to dtype."""
    compute = backend.dtype(weight_ENK).compute
    products: list[F] = []
    for expert, start, stop in segments(backend, offsets):
        x: F = x_RN[start:stop, :]
        weight_NK: F = weight_ENK[expert, :, :]
        product = backend.matmul(backend.cast(x, compute), backend.cast(weight_NK, compute))
        products.append(backend.cast(product, dtype))
    if not products:
        return backend.full((0, backend.shape(weight_ENK)[2]), 0.0, dtype)
    return backend.concat(products)


def grouped_weight_gradient(
    backend: Backend[F, I, L],
    dy_RN: F,
    x_RK: F,
    offsets: I,
    *,
    dtype: DType,
    strategy: ExpertStrategy,
) -> F:
    """Sum over each expert's rows of dy times x: [E, N, K] in the compute type `dtype`.

    An expert with no rows has an exactly zero slab.
    """
    rows_of = {expert: (start, stop) for expert, start, stop in segments(backend, offsets)}
    shape = (1, backend.shape(dy_RN)[1], backend.shape(x_RK)[1])
    zero = backend.full(shape, 0.0, dtype)
    slabs: list[F] = []
    for expert in range(backend.shape(offsets)[0] - 1):
        if expert not in rows_of:
            slabs.append(zero)
            continue
        start, stop = rows_of[expert]
        dy: F = dy_RN[start:stop, :]
        x: F = x_RK[start:stop, :]
        slab = backend.matmul(backend.transpose(backend.cast(dy, dtype)), backend.cast(x, dtype))
        slabs.append(backend.reshape(slab, shape))
    return backend.concat(slabs)


def _silu(backend: Backend[F, I, L], gate_RI: F, inner: DType) -> tuple[F, F, F]:
    """The triple g and sigmoid(g) in C, and s = silu(g) rounded to `inner` and widened again."""
    compute = inner.compute
    g_RI = backend.cast(gate_RI, compute)
    sigma_RI = sigmoid(backend, g_RI)
    s_RI = backend.cast(backend.cast(g_RI * sigma_RI, inner), compute)
    return g_RI, sigma_RI, s_RI


def swiglu(backend: Backend[F, I, L], gate_output_RI: F, up_output_RI: F) -> F:
    """The product a = silu(g) * u, each step rounded to the operands' type (contract 5)."""
    inner = backend.dtype(gate_output_RI)
    _, _, s_RI = _silu(backend, gate_output_RI, inner)
    return backend.cast(s_RI * backend.cast(up_output_RI, inner.compute), inner)


def swiglu_backward(
    backend: Backend[F, I, L], gate_output_RI: F, up_output_RI: F, da_RI: F
) -> tuple[F, F]:
    """Gradients dg and du from da, each step rounded to the operands' type (contract 7)."""
    inner = backend.dtype(gate_output_RI)
    compute = inner.compute
    g_RI, sigma_RI, s_RI = _silu(backend, gate_output_RI, inner)
    da_C = backend.cast(da_RI, compute)
    m_RI = backend.cast(backend.cast(da_C * backend.cast(up_output_RI, compute), inner), compute)
    slope_RI = sigma_RI * (g_RI * (-sigma_RI + 1.0) + 1.0)
    return backend.cast(m_RI * slope_RI, inner), backend.cast(da_C * s_RI, inner)


def weight_gradient_rows(
    backend: Backend[F, I, L],
    b_RI: F,
    activation_RI: F,
    *,
    dtype: DType,
    strategy: CombineGradientStrategy,
) -> F:
    """The sum over I of b * a, one dw a row [R], in the weights' type (contract 7)."""
    compute = wider(dtype, backend.dtype(b_RI))
    products_RI = backend.cast(b_RI, compute) * backend.cast(activation_RI, compute)
    return backend.cast(backend.sum(products_RI, axis=-1), dtype)


def scale_rows(backend: Backend[F, I, L], x_RN: F, weights_R1: F, dtype: DType) -> F:
    """Each row times its routing weight, formed in the wider type, rounded to dtype."""
    compute = wider(backend.dtype(weights_R1), backend.dtype(x_RN).compute)
    return backend.cast(backend.cast(x_RN, compute) * backend.cast(weights_R1, compute), dtype)


def experts_forward(
    backend: Backend[F, I, L],
    input_TH: F,
    layout: Dispatch[I],
    gate_EIH: F,
    up_EIH: F,
    down_EHI: F,
    *,
    options: ExpertOptions,
    gradients: ExpertsGradientSelection,
) -> tuple[F, Activations[F]]:
    """Expert outputs y [R, H] by row, and what the wanted gradients need (contract 5)."""
    inner = inner_dtype(backend.dtype(input_TH), options.intermediates)
    offsets, strategy = layout.expert_offsets, options.forward
    x_RH = backend.take_rows(input_TH, row_tokens(backend, layout))
    g_RI = backend.grouped_matmul(x_RH, gate_EIH, offsets, dtype=inner, strategy=strategy)
    u_RI = backend.grouped_matmul(x_RH, up_EIH, offsets, dtype=inner, strategy=strategy)
    a_RI = backend.swiglu(g_RI, u_RI)
    y_RH = backend.grouped_matmul(a_RI, down_EHI, offsets, dtype=inner, strategy=strategy)
    return y_RH, kept_activations(g_RI, u_RI, a_RI, gradients)


def kept_activations(
    gate_output: F, up_output: F, activation: F, gradients: ExpertsGradientSelection
) -> Activations[F]:
    """Keep g and u where a gradient passes through them, a alone where only it is read."""
    if gradients.input or gradients.gate or gradients.up:
        return Activations(gate_output=gate_output, up_output=up_output)
    if gradients.weights or gradients.down:
        return Activations(activation=activation)
    return Activations()


def experts_backward(
    backend: Backend[F, I, L],
    grad_output_TH: F,
    layout: Dispatch[I],
    weights_TK: F,
    input_TH: F | None,
    gate_EIH: F,
    up_EIH: F,
    down_EHI: F,
    kept: Activations[F],
    *,
    options: ExpertOptions,
    gradients: ExpertsGradientSelection,
) -> ExpertGradients[F]:
    """Gradients by row and by expert, those wanted (contract 7); gate and up need `input_TH`."""
    if not gradients.wanted:
        return ExpertGradients()
    storage = backend.dtype(grad_output_TH)
    compute, inner = storage.compute, inner_dtype(storage, options.intermediates)
    offsets, strategy = layout.expert_offsets, options.backward
    tokens_R = row_tokens(backend, layout)
    weights_R1 = row_weights(backend, layout, weights_TK)
    through_products = gradients.input or gradients.gate or gradients.up
    dout_RH = backend.take_rows(grad_output_TH, tokens_R)

    dweights_TK = ddown_EHI = dgate_EIH = dup_EIH = dx_RH = None
    b_RI = None
    if gradients.weights or through_products:
        b_RI = backend.grouped_matmul_transposed(
            dout_RH, down_EHI, offsets, dtype=inner, strategy=strategy
        )
    if gradients.weights or gradients.down:
        a_RI = kept.activation
        if a_RI is None:
            assert kept.gate_output is not None
            assert kept.up_output is not None
            a_RI = backend.swiglu(kept.gate_output, kept.up_output)
        if gradients.weights:
            assert b_RI is not None
            dweights_R = backend.weight_gradient_rows(
                b_RI, a_RI, dtype=backend.dtype(weights_TK), strategy=options.combine_backward
            )
            dweights_TK = slot_values(backend, layout, dweights_R)
        if gradients.down:
            dy_RH = scale_rows(backend, dout_RH, weights_R1, inner)
            ddown_EHI = backend.grouped_weight_gradient(
                dy_RH, a_RI, offsets, dtype=compute, strategy=strategy
            )
            del dy_RH
        del a_RI
    del dout_RH

    if through_products:
        assert b_RI is not None
        assert kept.gate_output is not None
        assert kept.up_output is not None
        da_RI = scale_rows(backend, b_RI, weights_R1, inner)
        del b_RI
        dg_RI, du_RI = backend.swiglu_backward(kept.gate_output, kept.up_output, da_RI)
        del da_RI
        if gradients.gate or gradients.up:
            assert input_TH is not None
            x_RH = backend.take_rows(input_TH, tokens_R)
            if gradients.gate:
                dgate_EIH = backend.grouped_weight_gradient(
                    dg_RI, x_RH, offsets, dtype=compute, strategy=strategy
                )
            if gradients.up:
                dup_EIH = backend.grouped_weight_gradient(
                    du_RI, x_RH, offsets, dtype=compute, strategy=strategy
                )
            del x_RH
        if gradients.input:
            from_gate_RH = backend.grouped_matmul_transposed(
                dg_RI, gate_EIH, offsets, dtype=inner, strategy=strategy
            )
            from_up_RH = backend.grouped_matmul_transposed(
                du_RI, up_EIH, offsets, dtype=inner, strategy=strategy
            )
            total_RH = backend.cast(from_gate_RH, compute) + backend.cast(from_up_RH, compute)
            dx_RH = backend.cast(total_RH, inner)
    return ExpertGradients(dx_RH, dweights_TK, dgate_EIH, dup_EIH, ddown_EHI)
