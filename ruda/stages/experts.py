"""SwiGLU experts over segments of rows, both ways (contract 5, 7).

Values between products are held in one type, `inner`: the storage type D, so that every step rounds
where the contract marks it, or the compute type C when the caller asked for no roundings. Each step
widens to C, computes, and narrows to `inner` once.

Shapes: R rows, H hidden, I intermediate, E experts; N, K any two of the widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol

from ruda.base.dtypes import DType, wider
from ruda.base.operations import Operations
from ruda.base.strategies import CombineGradientStrategy
from ruda.base.tensors import F, F_co, I, L
from ruda.stages.dispatch import Dispatch, row_tokens, row_weights, slot_values
from ruda.stages.options import ExpertOptions, ExpertsGradientSelection, Intermediates
from ruda.stages.products import ProductsStage
from ruda.stages.weights import sigmoid


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


def _silu(backend: Operations[F, I, L], gate_RI: F, inner: DType) -> tuple[F, F, F]:
    """The triple g and sigmoid(g) in C, and s = silu(g) rounded to `inner` and widened again."""
    compute = inner.compute
    g_RI = backend.cast(gate_RI, compute)
    sigma_RI = sigmoid(backend, g_RI)
    s_RI = backend.cast(backend.cast(g_RI * sigma_RI, inner), compute)
    return g_RI, sigma_RI, s_RI


def scale_rows(backend: Operations[F, I, L], x_RN: F, weights_R1: F, dtype: DType) -> F:
    """Each row times its routing weight, formed in the wider type, rounded to dtype."""
    compute = wider(backend.dtype(weights_R1), backend.dtype(x_RN).compute)
    return backend.cast(backend.cast(x_RN, compute) * backend.cast(weights_R1, compute), dtype)


def kept_activations(
    gate_output: F, up_output: F, activation: F, gradients: ExpertsGradientSelection
) -> Activations[F]:
    """Keep g and u where a gradient passes through them, a alone where only it is read."""
    if gradients.input or gradients.gate or gradients.up:
        return Activations(gate_output=gate_output, up_output=up_output)
    if gradients.weights or gradients.down:
        return Activations(activation=activation)
    return Activations()


class ExpertsStage(ProductsStage[F, I, L], Protocol[F, I, L]):
    """SwiGLU over rows, and the whole expert pass."""

    def swiglu(self, gate_output_RI: F, up_output_RI: F, /) -> F:
        """The product a = silu(g) * u, each step rounded to the operands' type (contract 5)."""
        inner = self.dtype(gate_output_RI)
        _, _, s_RI = _silu(self, gate_output_RI, inner)
        return self.cast(s_RI * self.cast(up_output_RI, inner.compute), inner)

    def swiglu_backward(
        self,
        gate_output_RI: F,
        up_output_RI: F,
        da_RI: F,
        /,
    ) -> tuple[F, F]:
        """Gradients dg and du from da, each step rounded to the operands' type (contract 7)."""
        inner = self.dtype(gate_output_RI)
        compute = inner.compute
        g_RI, sigma_RI, s_RI = _silu(self, gate_output_RI, inner)
        da_C = self.cast(da_RI, compute)
        m_RI = self.cast(self.cast(da_C * self.cast(up_output_RI, compute), inner), compute)
        slope_RI = sigma_RI * (g_RI * (-sigma_RI + 1.0) + 1.0)
        return self.cast(m_RI * slope_RI, inner), self.cast(da_C * s_RI, inner)

    def weight_gradient_rows(
        self,
        b_RI: F,
        activation_RI: F,
        /,
        *,
        dtype: DType,
        strategy: CombineGradientStrategy,
    ) -> F:
        """The sum over I of b * a, one dw a row [R], in the weights' type (contract 7)."""
        compute = wider(dtype, self.dtype(b_RI))
        products_RI = self.cast(b_RI, compute) * self.cast(activation_RI, compute)
        return self.cast(self.sum(products_RI, axis=-1), dtype)

    def experts_forward(
        self,
        input_TH: F,
        layout: Dispatch[I],
        gate_EIH: F,
        up_EIH: F,
        down_EHI: F,
        /,
        *,
        options: ExpertOptions,
        gradients: ExpertsGradientSelection,
    ) -> tuple[F, Activations[F]]:
        """Expert outputs y [R, H] by row, and what the wanted gradients need (contract 5)."""
        inner = inner_dtype(self.dtype(input_TH), options.intermediates)
        offsets, strategy = layout.expert_offsets, options.forward
        x_RH = self.take_rows(input_TH, row_tokens(self, layout))
        g_RI = self.grouped_matmul(x_RH, gate_EIH, offsets, dtype=inner, strategy=strategy)
        u_RI = self.grouped_matmul(x_RH, up_EIH, offsets, dtype=inner, strategy=strategy)
        a_RI = self.swiglu(g_RI, u_RI)
        y_RH = self.grouped_matmul(a_RI, down_EHI, offsets, dtype=inner, strategy=strategy)
        return y_RH, kept_activations(g_RI, u_RI, a_RI, gradients)

    def experts_backward(
        self,
        grad_output_TH: F,
        layout: Dispatch[I],
        weights_TK: F,
        input_TH: F | None,
        gate_EIH: F,
        up_EIH: F,
        down_EHI: F,
        kept: Activations[F],
        /,
        *,
        options: ExpertOptions,
        gradients: ExpertsGradientSelection,
    ) -> ExpertGradients[F]:
        """The wanted gradients by row and by expert (contract 7); gate and up need `input_TH`."""
        if not gradients.wanted:
            return ExpertGradients()
        storage = self.dtype(grad_output_TH)
        compute, inner = storage.compute, inner_dtype(storage, options.intermediates)
        offsets, strategy = layout.expert_offsets, options.backward
        tokens_R = row_tokens(self, layout)
        weights_R1 = row_weights(self, layout, weights_TK)
        through_products = gradients.input or gradients.gate or gradients.up
        dout_RH = self.take_rows(grad_output_TH, tokens_R)

        dweights_TK = ddown_EHI = dgate_EIH = dup_EIH = dx_RH = None
        b_RI = None
        if gradients.weights or through_products:
            b_RI = self.grouped_matmul_transposed(
                dout_RH, down_EHI, offsets, dtype=inner, strategy=strategy
            )
        if gradients.weights or gradients.down:
            a_RI = kept.activation
            if a_RI is None:
                assert kept.gate_output is not None
                assert kept.up_output is not None
                a_RI = self.swiglu(kept.gate_output, kept.up_output)
            if gradients.weights:
                assert b_RI is not None
                dweights_R = self.weight_gradient_rows(
                    b_RI, a_RI, dtype=self.dtype(weights_TK), strategy=options.combine_backward
                )
                dweights_TK = slot_values(self, layout, dweights_R)
            if gradients.down:
                dy_RH = scale_rows(self, dout_RH, weights_R1, inner)
                ddown_EHI = self.grouped_weight_gradient(
                    dy_RH, a_RI, offsets, dtype=compute, strategy=strategy
                )
                del dy_RH
            del a_RI
        del dout_RH

        if through_products:
            assert b_RI is not None
            assert kept.gate_output is not None
            assert kept.up_output is not None
            da_RI = scale_rows(self, b_RI, weights_R1, inner)
            del b_RI
            dg_RI, du_RI = self.swiglu_backward(kept.gate_output, kept.up_output, da_RI)
            del da_RI
            if gradients.gate or gradients.up:
                assert input_TH is not None
                x_RH = self.take_rows(input_TH, tokens_R)
                if gradients.gate:
                    dgate_EIH = self.grouped_weight_gradient(
                        dg_RI, x_RH, offsets, dtype=compute, strategy=strategy
                    )
                if gradients.up:
                    dup_EIH = self.grouped_weight_gradient(
                        du_RI, x_RH, offsets, dtype=compute, strategy=strategy
                    )
                del x_RH
            if gradients.input:
                from_gate_RH = self.grouped_matmul_transposed(
                    dg_RI, gate_EIH, offsets, dtype=inner, strategy=strategy
                )
                from_up_RH = self.grouped_matmul_transposed(
                    du_RI, up_EIH, offsets, dtype=inner, strategy=strategy
                )
                total_RH = self.cast(from_gate_RH, compute) + self.cast(from_up_RH, compute)
                dx_RH = self.cast(total_RH, inner)
        return ExpertGradients(dx_RH, dweights_TK, dgate_EIH, dup_EIH, ddown_EHI)
