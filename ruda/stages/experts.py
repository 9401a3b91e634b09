"""SwiGLU experts over segments of rows, both ways (contract 5, 7).

Rows come in grouped by expert and go out so; where they come from, and where they go, is not known
here: an owner of experts calls this for rows of tokens on other machines. The activation is one
seam, `swiglu` and `swiglu_backward`, whoever runs the products.

Values between products are held in one type, `inner`: the storage type D, so that every step rounds
where the contract marks it, or the compute type C when the caller asked for no roundings. Each step
widens to C, computes, and narrows to `inner` once.

Shapes: R rows, H hidden, I intermediate, E experts; N, K any two of the widths.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol

from ruda.base.dtypes import DType, wider
from ruda.base.operations import Operations
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy
from ruda.base.tensors import F, F_co, I, L
from ruda.stages.options import ExpertOptions, ExpertsGradientSelection, Intermediates
from ruda.stages.products import ProductsStage
from ruda.stages.weights import sigmoid


class ExpertWeights(NamedTuple, Generic[F_co]):
    """The three matrices of every expert: `gate` and `up` [E, I, H], `down` [E, H, I]."""

    gate: F_co
    up: F_co
    down: F_co


class Activations(NamedTuple, Generic[F_co]):
    """What a forward keeps of its rows for its backward: of the following what it needs.

    x [R, H] where the gate or up gradient is wanted; g and u [R, I], or a alone (contract 7).
    """

    input: F_co | None = None
    gate_output: F_co | None = None
    up_output: F_co | None = None
    activation: F_co | None = None


class ExpertGradients(NamedTuple, Generic[F_co]):
    """Gradients by row, of its input [R, H] and weight [R], and by expert; `None`: not wanted."""

    input: F_co | None = None
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


def scale_rows(backend: Operations[F, I, L], x_RN: F, weights_R: F, dtype: DType) -> F:
    """Each row times its routing weight, formed in the wider type, rounded to dtype."""
    compute = wider(backend.dtype(weights_R), backend.dtype(x_RN).compute)
    weights_R1 = backend.reshape(weights_R, (backend.shape(weights_R)[0], 1))
    return backend.cast(backend.cast(x_RN, compute) * backend.cast(weights_R1, compute), dtype)


def kept_activations(
    input: F, gate_output: F, up_output: F, activation: F, gradients: ExpertsGradientSelection
) -> Activations[F]:
    """Keep g and u where a gradient passes through them, a alone where only it is read."""
    x = input if gradients.gate or gradients.up else None
    if gradients.input or x is not None:
        return Activations(input=x, gate_output=gate_output, up_output=up_output)
    if gradients.weights or gradients.down:
        return Activations(activation=activation)
    return Activations()


def _kept(tensor: F | None) -> F:
    """What the forward kept for a gradient that it was told of."""
    assert tensor is not None
    return tensor


class ExpertsStage(ProductsStage[F, I, L], Protocol[F, I, L]):
    """SwiGLU over rows, and the whole pass over them."""

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
        du_RI = self.cast(da_C * s_RI, inner)
        slope_RI = sigma_RI * (g_RI * (-sigma_RI + 1.0) + 1.0)
        del g_RI, sigma_RI, s_RI
        m_RI = self.cast(self.cast(da_C * self.cast(up_output_RI, compute), inner), compute)
        return self.cast(m_RI * slope_RI, inner), du_RI

    def routing_weight_gradient(
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

    def expert_rows_forward(
        self,
        x_RH: F,
        offsets: I,
        experts: ExpertWeights[F],
        /,
        *,
        options: ExpertOptions,
        gradients: ExpertsGradientSelection,
    ) -> tuple[F, Activations[F]]:
        """Outputs y [R, H] of rows grouped by expert, and what the wanted gradients need of them.

        `offsets` [E+1] bound each expert's rows (contract 5).
        """
        inner = inner_dtype(self.dtype(x_RH), options.intermediates)
        strategy = options.forward
        g_RI = self.grouped_matmul(x_RH, experts.gate, offsets, dtype=inner, strategy=strategy)
        u_RI = self.grouped_matmul(x_RH, experts.up, offsets, dtype=inner, strategy=strategy)
        a_RI = self.swiglu(g_RI, u_RI)
        y_RH = self.grouped_matmul(a_RI, experts.down, offsets, dtype=inner, strategy=strategy)
        return y_RH, kept_activations(x_RH, g_RI, u_RI, a_RI, gradients)

    def expert_rows_backward(
        self,
        dout_RH: F,
        weights_R: F,
        offsets: I,
        experts: ExpertWeights[F],
        kept: Activations[F],
        /,
        *,
        options: ExpertOptions,
        gradients: ExpertsGradientSelection,
    ) -> ExpertGradients[F]:
        """The wanted gradients by row and by expert (contract 7).

        `dout_RH` is the upstream gradient of each row's token and `weights_R` the row's routing
        weight: y entered the output times it. `kept` is what the forward gave.
        """
        inner = inner_dtype(self.dtype(dout_RH), options.intermediates)
        compute, strategy = inner.compute, options.backward
        through_products = gradients.input or gradients.gate or gradients.up

        b_RI = dweights_R = dgate_EIH = dup_EIH = ddown_EHI = dx_RH = None
        if gradients.weights or through_products:
            b_RI = self.grouped_matmul_transposed(
                dout_RH, experts.down, offsets, dtype=inner, strategy=strategy
            )
        if gradients.weights or gradients.down:
            a_RI = kept.activation
            if a_RI is None:
                a_RI = self.swiglu(_kept(kept.gate_output), _kept(kept.up_output))
            if b_RI is not None and gradients.weights:
                dweights_R = self.routing_weight_gradient(
                    b_RI, a_RI, dtype=self.dtype(weights_R), strategy=options.combine_backward
                )
            if gradients.down:
                dy_RH = scale_rows(self, dout_RH, weights_R, inner)
                ddown_EHI = self.expert_weight_gradient(
                    dy_RH, a_RI, offsets, dtype=compute, strategy=strategy
                )
                del dy_RH
            del a_RI
        del dout_RH
        if b_RI is None or not through_products:
            return ExpertGradients(weights=dweights_R, down=ddown_EHI)
        da_RI = scale_rows(self, b_RI, weights_R, inner)
        del b_RI
        dg_RI, du_RI = self.swiglu_backward(_kept(kept.gate_output), _kept(kept.up_output), da_RI)
        del da_RI
        if gradients.gate:
            dgate_EIH = self.expert_weight_gradient(
                dg_RI, _kept(kept.input), offsets, dtype=compute, strategy=strategy
            )
        if gradients.up:
            dup_EIH = self.expert_weight_gradient(
                du_RI, _kept(kept.input), offsets, dtype=compute, strategy=strategy
            )
        del kept
        if gradients.input:
            dx_RH = _input_gradient(self, dg_RI, du_RI, offsets, experts, inner, strategy)
        return ExpertGradients(dx_RH, dweights_R, dgate_EIH, dup_EIH, ddown_EHI)


def _input_gradient(
    backend: ProductsStage[F, I, L],
    dg_RI: F,
    du_RI: F,
    offsets: I,
    experts: ExpertWeights[F],
    inner: DType,
    strategy: ExpertStrategy,
) -> F:
    """dx [R, H]: back through the gate and the up matrix, each rounded, and their sum rounded."""
    from_gate_RH = backend.grouped_matmul_transposed(
        dg_RI, experts.gate, offsets, dtype=inner, strategy=strategy
    )
    from_up_RH = backend.grouped_matmul_transposed(
        du_RI, experts.up, offsets, dtype=inner, strategy=strategy
    )
    compute = inner.compute
    total_RH = backend.cast(from_gate_RH, compute) + backend.cast(from_up_RH, compute)
    return backend.cast(total_RH, inner)
