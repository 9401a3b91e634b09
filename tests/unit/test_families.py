"""The family table against the routers it was read from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.families.table import FAMILIES, get_family
from ruda.testing.reference import Arithmetic, reference_selection, reference_weights


def test_every_family_is_consistent() -> None:
    for name, family in FAMILIES.items():
        assert family.name == name
        family.selection.check(family.experts)
        assert family.options.selection is family.selection
        assert 1 <= family.top_k <= family.experts
        assert "transformers" in family.source
        biased = isinstance(family.selection, ruda.GroupedSelection)
        assert biased or not family.has_correction_bias


def test_logits_dtype() -> None:
    assert get_family("mixtral").logits_dtype(DType.BFLOAT16) is DType.BFLOAT16
    assert get_family("deepseek_v3").logits_dtype(DType.BFLOAT16) is DType.FLOAT32
    assert get_family("deepseek_v3").logits_dtype(DType.FLOAT64) is DType.FLOAT64


def test_unknown_family() -> None:
    with pytest.raises(ruda.ConfigurationError, match=r"qwen3_moe.*got 'gpt'"):
        get_family("gpt")


def test_importing_the_table_loads_no_array_library() -> None:
    code = "import sys, ruda.families.table; print('numpy' in sys.modules, 'torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert made.stdout.split() == ["False", "False"]


def _router(name: str) -> Any:
    """The family's router from transformers: its experts and rules, a narrow hidden width."""
    family = get_family(name)
    common = {"hidden_size": 16, "num_experts_per_tok": family.top_k}
    if name == "qwen3_moe":
        from transformers.models.qwen3_moe import modeling_qwen3_moe as code

        config = code.Qwen3MoeConfig(**common, num_experts=family.experts, norm_topk_prob=True)
        return code.Qwen3MoeTopKRouter(config)
    if name == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as code

        return code.MixtralTopKRouter(
            code.MixtralConfig(**common, num_local_experts=family.experts)
        )
    if name == "olmoe":
        from transformers.models.olmoe import modeling_olmoe as code

        return code.OlmoeTopKRouter(code.OlmoeConfig(**common, num_experts=family.experts))
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as code

    # All of its routing rules are the defaults of the class.
    config = code.DeepseekV3Config(hidden_size=16)
    assert config.n_routed_experts == family.experts
    assert config.num_experts_per_tok == family.top_k
    return code.DeepseekV3TopkRouter(config)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.filterwarnings("default")
def test_rules_are_those_of_the_router(name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    family = get_family(name)
    router = _router(name)
    generator = torch.Generator().manual_seed(3)
    bias = None
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        if family.has_correction_bias:
            router.e_score_correction_bias.copy_(
                0.3 * torch.randn(family.experts, generator=generator)
            )
            bias = router.e_score_correction_bias.numpy()
        logits, weights, ids = router(torch.randn((64, 16), generator=generator))
    ours = reference_selection(logits.numpy(), bias, family.selection)
    order = np.argsort(ids.numpy(), axis=1)
    assert np.array_equal(np.sort(ours, axis=1), np.take_along_axis(ids.numpy(), order, axis=1))
    expected = reference_weights(
        logits.numpy(), np.sort(ours, axis=1), family.weights, Arithmetic.exact()
    )
    got = np.take_along_axis(weights.numpy(), order, axis=1)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)
