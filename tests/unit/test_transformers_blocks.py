"""Sparse blocks of `transformers` against `ruda`: code that others wrote, and run as it stands.

Each small random block is run twice. Whole: its own forward, and autograd through router and
experts together. Taken apart: its own router on logits that are a leaf of their own, then its own
experts on hidden states that are another, so that autograd gives the five gradients of
`MoeBackward` one by one. `ruda` gets the block's hidden states, router logits, correction bias and
packed weights, and the options of the block's family: what each `*TopKRouter.forward` of
transformers 5.24 does. The cases named `published` take their options from `ruda.families`, and the
block's sizes and rules (all but the widths H and I) from the defaults of its configuration class.

The reference is always PyTorch on the CPU in float32; every backend present is compared with it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.families.table import FAMILIES
from ruda.stages.options import Selection

SOFTMAX, SIGMOID = ruda.RouterScoring.SOFTMAX, ruda.RouterScoring.SIGMOID
TOKENS, HIDDEN, INTERMEDIATE = 33, 32, 20
TOLERANCE = 1e-5
SEEDS = (0, 1, 2)
WHY = "these tests compare with the sparse blocks of transformers 5 or newer, run by PyTorch"

Array: TypeAlias = npt.NDArray[Any]


class Source(NamedTuple):
    """Where transformers keeps a family, and what its configuration calls I."""

    config: str
    block: str
    intermediate: str


SOURCES = {
    "mixtral": Source("MixtralConfig", "MixtralSparseMoeBlock", "intermediate_size"),
    "qwen3_moe": Source("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", "moe_intermediate_size"),
    "olmoe": Source("OlmoeConfig", "OlmoeSparseMoeBlock", "intermediate_size"),
    "deepseek_v2": Source("DeepseekV2Config", "DeepseekV2Moe", "moe_intermediate_size"),
    "deepseek_v3": Source("DeepseekV3Config", "DeepseekV3MoE", "moe_intermediate_size"),
}


class Case(NamedTuple):
    """A block's configuration, and the options that must reproduce it."""

    family: str
    config: dict[str, Any]
    options: ruda.MoeOptions
    faint: bool = False
    """Logits near -46, so that sigmoid scores are as small as the epsilon of their sum."""


def softmax(k: int, *, renormalize: bool, scale: float = 1.0, groups: int = 1) -> ruda.MoeOptions:
    selection: Selection = ruda.SoftmaxSelection(k)
    if groups > 1:
        selection = ruda.GroupedSelection(k, SOFTMAX, groups, selected_groups=2)
    weights = ruda.RouterWeightOptions(SOFTMAX, renormalize, scale)
    return ruda.MoeOptions(selection=selection, weights=weights)


def sigmoid(k: int, *, renormalize: bool, scale: float, groups: int = 1) -> ruda.MoeOptions:
    selection = ruda.GroupedSelection(k)
    if groups > 1:
        selection = ruda.GroupedSelection(k, SIGMOID, groups, 2, group_top_two=True)
    weights = ruda.RouterWeightOptions(SIGMOID, renormalize, scale, 1e-20 if renormalize else 0.0)
    return ruda.MoeOptions(selection=selection, weights=weights)


def config(experts: str, count: int, k: int, **more: Any) -> dict[str, Any]:
    return {experts: count, "num_experts_per_tok": k, **more}


deepseek = functools.partial(config, "n_routed_experts")
GROUPS = {"n_group": 4, "topk_group": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
IN_GROUPS = {**GROUPS, "topk_method": "group_limited_greedy"}

CASES = {
    # Mixtral always renormalizes.
    "mixtral": Case("mixtral", config("num_local_experts", 8, 2), softmax(2, renormalize=True)),
    "qwen3_moe": Case(
        "qwen3_moe",
        config("num_experts", 12, 4, norm_topk_prob=True),
        softmax(4, renormalize=True),
    ),
    "qwen3_moe-plain": Case(
        "qwen3_moe",
        config("num_experts", 9, 3, norm_topk_prob=False),
        softmax(3, renormalize=False),
    ),
    "olmoe": Case(
        "olmoe",
        config("num_experts", 10, 3, norm_topk_prob=False),
        softmax(3, renormalize=False),
    ),
    "olmoe-renormalized": Case(
        "olmoe",
        config("num_experts", 10, 3, norm_topk_prob=True),
        softmax(3, renormalize=True),
    ),
    "deepseek_v2-greedy": Case(
        "deepseek_v2",
        deepseek(12, 3, topk_method="greedy", routed_scaling_factor=1.0),
        softmax(3, renormalize=False),
    ),
    # The router of transformers does not read DeepSeek-V2's norm_topk_prob.
    "deepseek_v2-scaled": Case(
        "deepseek_v2",
        deepseek(8, 4, topk_method="greedy", routed_scaling_factor=2.5, norm_topk_prob=True),
        softmax(4, renormalize=False, scale=2.5),
    ),
    "deepseek_v2-groups": Case(
        "deepseek_v2",
        deepseek(12, 3, **IN_GROUPS, routed_scaling_factor=16.0),
        softmax(3, renormalize=False, scale=16.0, groups=4),
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        deepseek(12, 4, **GROUPS, routed_scaling_factor=2.5, norm_topk_prob=True),
        sigmoid(4, renormalize=True, scale=2.5, groups=4),
    ),
    "deepseek_v3-plain": Case(
        "deepseek_v3",
        deepseek(12, 3, **GROUPS, routed_scaling_factor=1.5, norm_topk_prob=False),
        sigmoid(3, renormalize=False, scale=1.5, groups=4),
    ),
    "deepseek_v3-one_group": Case(
        "deepseek_v3",
        deepseek(12, 2, **ONE_GROUP, routed_scaling_factor=1.0, norm_topk_prob=True),
        sigmoid(2, renormalize=True, scale=1.0),
    ),
    "deepseek_v3-faint": Case(
        "deepseek_v3",
        deepseek(12, 3, **GROUPS, routed_scaling_factor=2.5, norm_topk_prob=True),
        sigmoid(3, renormalize=True, scale=2.5, groups=4),
        faint=True,
    ),
    # The one published rule that is not the class default: Qwen3-30B-A3B renormalizes.
    "qwen3_moe-published": Case(
        "qwen3_moe", {"norm_topk_prob": True}, FAMILIES["qwen3_moe"].options
    ),
    **{
        f"{name}-published": Case(name, {}, FAMILIES[name].options)
        for name in ("mixtral", "olmoe", "deepseek_v3")
    },
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a block was given, and what transformers and autograd made of it."""

    operands: dict[str, Array]
    """hidden and grad_output [T, H], logits [T, E], router [E, H],
    gate_up [E, 2I, H], down [E, H, I]."""
    bias: Array | None
    apart: dict[str, Array]
    """ids and weights by ascending id, output, and the five gradients one by one."""
    whole: dict[str, Array]
    """output, and the gradients of hidden states and parameters through the block's own forward."""


def by_id(ids: Array, weights: Array) -> dict[str, Array]:
    """A token's experts are a set: the order of its slots is each implementation's own."""
    order = np.argsort(ids, axis=-1)
    return {
        "ids": np.take_along_axis(ids, order, -1),
        "weights": np.take_along_axis(weights, order, -1),
    }


def make_block(case: Case, rng: np.random.Generator) -> Any:
    """The family's block with random weights, and a bias where it has one; no shared experts."""
    torch = pytest.importorskip("torch", reason=WHY, exc_type=ImportError)
    pytest.importorskip("transformers", minversion="5", reason=WHY, exc_type=ImportError)
    source = SOURCES[case.family]
    package = f"transformers.models.{case.family}"
    configuration = importlib.import_module(f"{package}.configuration_{case.family}")
    modeling = importlib.import_module(f"{package}.modeling_{case.family}")
    widths = {"hidden_size": HIDDEN, source.intermediate: INTERMEDIATE}
    settings = getattr(configuration, source.config)(**widths, **case.config)
    settings._experts_implementation = "eager"
    block = getattr(modeling, source.block)(settings)
    with torch.no_grad():
        for parameter in block.parameters():
            values = rng.standard_normal(tuple(parameter.shape)) / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(values))
        for bias in block.gate.buffers():
            # Below zero, so that a fill of 0 for the groups left out would be chosen.
            bias.copy_(torch.from_numpy(0.2 * rng.standard_normal(tuple(bias.shape)) - 0.5))
        if case.faint:
            block.gate.weight[:, 0] = -46.0
        if "shared_experts" in dict(block.named_children()):
            block.shared_experts.down_proj.weight.zero_()
    return block


def router_of_logits(block: Any) -> Any:
    """The block's own router, its linear layer made the identity, so that it takes logits."""
    import torch

    router = copy.deepcopy(block.gate)
    router.hidden_dim = len(router.weight)
    router.weight = torch.nn.Parameter(torch.eye(router.hidden_dim), requires_grad=False)
    return router


@functools.cache
def reference(name: str, seed: int) -> Reference:
    case = CASES[name]
    rng = np.random.default_rng([seed, *name.encode()])
    block = make_block(case, rng)
    import torch

    values = rng.standard_normal((1, TOKENS, HIDDEN))
    if case.faint:
        values[..., 0] = 1.0
    hidden = torch.from_numpy(values.astype(np.float32)).requires_grad_()
    grad_output = torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32))
    packed, down, router_weight = (
        block.experts.gate_up_proj,
        block.experts.down_proj,
        block.gate.weight,
    )

    output = block(hidden)[0]
    parameters = (hidden, router_weight, packed, down)
    gradients = torch.autograd.grad((output * grad_output).sum(), parameters)
    whole = dict(zip(("hidden", "router", "gate_up", "down"), gradients, strict=True))
    whole |= {"hidden": whole["hidden"][0], "output": output}

    tokens = hidden.detach()[0].requires_grad_()
    logits = block.gate(tokens)[0].detach().requires_grad_()
    echo, weights, ids = router_of_logits(block)(logits)
    assert torch.equal(echo, logits)
    output = block.experts(tokens, ids, weights)
    gradients = torch.autograd.grad((output * grad_output).sum(), (tokens, logits, packed, down))
    apart = dict(zip(("input", "logits", "gate_up", "down"), gradients, strict=True))
    gate_up = apart.pop("gate_up")
    apart |= {"gate": gate_up[:, :INTERMEDIATE], "up": gate_up[:, INTERMEDIATE:], "output": output}

    def arrays(tensors: dict[str, Any]) -> dict[str, Array]:
        return {key: tensor.detach().numpy() for key, tensor in tensors.items()}

    operands = {"hidden": tokens, "logits": logits, "gate_up": packed, "down": down}
    biases = [bias.numpy() for bias in block.gate.buffers()]
    assert all(np.all(bias != 0) for bias in biases)
    return Reference(
        arrays({**operands, "router": router_weight, "grad_output": grad_output}),
        biases[0] if biases else None,
        arrays(apart) | by_id(ids.numpy(), weights.detach().numpy()),
        arrays(whole),
    )


def by_ruda(
    backend: AnyBackend, options: ruda.MoeOptions, given: Reference
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The same two records, from `ruda`: taken apart, and put together again by the chain rule."""
    operands = {key: backend.from_numpy(array) for key, array in given.operands.items()}
    gate, up = operands["gate_up"][:, :INTERMEDIATE], operands["gate_up"][:, INTERMEDIATE:]
    bias = None if given.bias is None else backend.from_numpy(given.bias)
    logits = operands["logits"]
    output, state = ruda.moe_forward(
        operands["hidden"], logits, gate, up, operands["down"],
        options=options, correction_bias=bias, backend=backend,
    )  # fmt: skip
    gradients = ruda.moe_backward(state, operands["grad_output"])
    ids = ruda.moe_route_indices(state)
    weights = ruda.selected_router_weights(logits, ids, options.weights, backend=backend)

    apart = {name: backend.to_numpy(tensor) for name, tensor in gradients.asdict().items()}
    apart |= {"output": backend.to_numpy(output)}
    whole = {
        "output": apart["output"],
        "hidden": apart["input"] + apart["logits"] @ given.operands["router"],
        "router": apart["logits"].T @ given.operands["hidden"],
        "gate_up": np.concatenate([apart["gate"], apart["up"]], axis=1),
        "down": apart["down"],
    }
    return apart | by_id(backend.to_numpy(ids), backend.to_numpy(weights)), whole


def disagreements(found: dict[str, Array], expected: dict[str, Array]) -> dict[str, str]:
    """What differs, by name: ids at all, anything else by more than 1e-5 of the largest element."""
    assert found.keys() == expected.keys()
    verdicts: dict[str, str] = {}
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        if name == "ids":
            rows = np.any(found[name] != array, axis=-1)
            if rows.any():
                verdicts[name] = f"{rows.sum()} of {len(rows)} tokens chose other experts"
            continue
        assert found[name].dtype == array.dtype == np.float32, name
        error = np.abs(found[name] - array).max() / np.abs(array).max()
        if not error <= TOLERANCE:
            verdicts[name] = f"relative error {error:.2e}"
    return verdicts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_block(backend: AnyBackend, name: str, seed: int) -> None:
    expected = reference(name, seed)
    apart, whole = by_ruda(backend, CASES[name].options, expected)
    assert disagreements(apart, expected.apart) == {}
    assert disagreements(whole, expected.whole) == {}


def weights_with(**changes: Any) -> Callable[[ruda.MoeOptions], ruda.MoeOptions]:
    return lambda options: dataclasses.replace(
        options, weights=dataclasses.replace(options.weights, **changes)
    )


def selection_with(**changes: Any) -> Callable[[ruda.MoeOptions], ruda.MoeOptions]:
    return lambda options: dataclasses.replace(
        options,
        selection=dataclasses.replace(options.selection, **changes),
    )


SAME_EXPERTS = {"weights", "output", "input", "logits", "gate", "up", "down"}
OTHER_EXPERTS = {"ids", *SAME_EXPERTS}


@pytest.mark.parametrize(
    ("name", "mistake", "wrong"),
    [
        ("mixtral", weights_with(renormalize=False), SAME_EXPERTS),
        ("qwen3_moe", weights_with(renormalize=False), SAME_EXPERTS),
        ("qwen3_moe-plain", weights_with(renormalize=True), SAME_EXPERTS),
        ("olmoe", weights_with(renormalize=True), SAME_EXPERTS),
        ("olmoe", weights_with(scoring=SIGMOID), SAME_EXPERTS),
        ("deepseek_v2-scaled", weights_with(renormalize=True), SAME_EXPERTS),
        ("deepseek_v2-scaled", weights_with(scale=1.0), SAME_EXPERTS),
        ("deepseek_v2-groups", selection_with(groups=1, selected_groups=1), OTHER_EXPERTS),
        ("deepseek_v2-groups", selection_with(group_top_two=True), OTHER_EXPERTS),
        ("deepseek_v3", selection_with(group_top_two=False), OTHER_EXPERTS),
        ("deepseek_v3", weights_with(scale=1.0), SAME_EXPERTS),
        ("deepseek_v3", weights_with(scoring=SOFTMAX), SAME_EXPERTS),
        ("deepseek_v3-faint", weights_with(epsilon=0.0), SAME_EXPERTS),
    ],
)
def test_the_wrong_rule_is_noticed(
    backend: AnyBackend,
    name: str,
    mistake: Callable[[ruda.MoeOptions], ruda.MoeOptions],
    wrong: set[str],
) -> None:
    expected = reference(name, SEEDS[0])
    apart, whole = by_ruda(backend, mistake(CASES[name].options), expected)
    assert disagreements(apart, expected.apart).keys() == wrong
    assert disagreements(whole, expected.whole).keys() == expected.whole.keys()


def test_a_forgotten_correction_bias_is_noticed(backend: AnyBackend) -> None:
    expected = reference("deepseek_v3", SEEDS[0])
    unbiased = dataclasses.replace(expected, bias=None)
    apart, _ = by_ruda(backend, CASES["deepseek_v3"].options, unbiased)
    assert disagreements(apart, expected.apart).keys() == OTHER_EXPERTS
