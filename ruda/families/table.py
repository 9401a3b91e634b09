"""Model families: the shape of one routed branch, and the rules it routes by.

To add a family, add one `Family` to the table. Read the rules from the model's own code, not from
its paper, and name that code in `source`; take the geometry from the published configuration of the
checkpoint in `model`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ruda.base.dtypes import DType
from ruda.base.errors import ConfigurationError
from ruda.base.values import shown
from ruda.stages.options import (
    GroupedSelection,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    SoftmaxSelection,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One branch of a published model. Shared experts and dense layers are not part of it."""

    name: str
    model: str
    """The checkpoint whose geometry this is."""
    source: str
    """The code the routing rules were read from."""
    hidden: int
    """H"""
    intermediate: int
    """I, of one routed expert"""
    experts: int
    """E"""
    selection: SoftmaxSelection | GroupedSelection
    weights: RouterWeightOptions
    has_correction_bias: bool = False
    router_dtype: DType | None = None
    """The type the logits are computed in, or `None` where it is the model's own."""

    @property
    def top_k(self) -> int:
        """Experts chosen per token, k."""
        return self.selection.top_k

    @property
    def options(self) -> MoeOptions:
        """The branch's options, with every strategy left at its default."""
        return MoeOptions(selection=self.selection, weights=self.weights)

    def logits_dtype(self, storage: DType) -> DType:
        """The type L of the logits where the experts have the type `storage`."""
        if self.router_dtype is None or storage is DType.FLOAT64:
            return storage
        return self.router_dtype


_TABLE = (
    # The class default of `norm_topk_prob` is False; the published configuration says True.
    Family(
        name="qwen3_moe",
        model="Qwen/Qwen3-30B-A3B",
        source="transformers 5.24, qwen3_moe: Qwen3MoeTopKRouter",
        hidden=2048,
        intermediate=768,
        experts=128,
        selection=SoftmaxSelection(top_k=8),
        weights=RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True),
    ),
    Family(
        name="mixtral",
        model="mistralai/Mixtral-8x7B-v0.1",
        source="transformers 5.24, mixtral: MixtralTopKRouter",
        hidden=4096,
        intermediate=14336,
        experts=8,
        selection=SoftmaxSelection(top_k=2),
        weights=RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True),
    ),
    # The router multiplies in float32 whatever the type of the experts.
    Family(
        name="deepseek_v3",
        model="deepseek-ai/DeepSeek-V3",
        source="transformers 5.24, deepseek_v3: DeepseekV3TopkRouter",
        hidden=7168,
        intermediate=2048,
        experts=256,
        selection=GroupedSelection(
            top_k=8,
            scoring=RouterScoring.SIGMOID,
            groups=8,
            selected_groups=4,
            group_top_two=True,
        ),
        weights=RouterWeightOptions(
            RouterScoring.SIGMOID, renormalize=True, scale=2.5, epsilon=1e-20
        ),
        has_correction_bias=True,
        router_dtype=DType.FLOAT32,
    ),
    Family(
        name="olmoe",
        model="allenai/OLMoE-1B-7B-0924",
        source="transformers 5.24, olmoe: OlmoeTopKRouter",
        hidden=2048,
        # The configuration's 1024; the class default, 2048, is not that of the checkpoint.
        intermediate=1024,
        experts=64,
        selection=SoftmaxSelection(top_k=8),
        weights=RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=False),
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}


def get_family(name: str) -> Family:
    """The family with this name; `ConfigurationError` for one that is not in the table."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise ConfigurationError(
            f"family: expected one of {', '.join(FAMILIES)}, got {shown(name)}"
        ) from None
