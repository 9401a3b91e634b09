"""What a caller may write for a number, a truth or a member, and what a refusal quotes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ruda
from ruda.base.values import shown
from ruda.testing.files.options import dump_options, load_options

PLAIN = ruda.MoeOptions(
    selection=ruda.GroupedSelection(
        2, ruda.RouterScoring.SIGMOID, groups=4, selected_groups=2, group_top_two=True
    ),
    weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, True, 2.5, 0.0),
    forward=ruda.ExpertStrategy.SCALAR,
    combine_backward=ruda.CombineGradientStrategy.SERIAL,
    intermediates=ruda.Intermediates.COMPUTE,
)


def written(integer: Any, real: Any, truth: Any) -> ruda.MoeOptions:
    """The same, by values and by NumPy's scalars."""
    scoring: Any = "sigmoid"
    softmax: Any = "softmax"
    return ruda.MoeOptions(
        selection=ruda.GroupedSelection(
            integer(2), scoring, groups=integer(4), selected_groups=integer(2), group_top_two=truth
        ),
        weights=ruda.RouterWeightOptions(softmax, truth, real(2.5), real(0)),
        forward="scalar",  # type: ignore[arg-type]
        combine_backward="serial",  # type: ignore[arg-type]
        intermediates="compute",  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("integer", [int, np.int64, np.uint8, np.int32])
@pytest.mark.parametrize("real", [float, np.float32, np.float64, np.float16])
@pytest.mark.parametrize("truth", [True, np.True_])
def test_numpy_scalars_and_values_of_enums(integer: Any, real: Any, truth: Any) -> None:
    options = written(integer, real, truth)
    assert options == PLAIN
    assert load_options(dump_options(options)) == PLAIN
    # What is kept is Python's own: it prints, and goes to JSON, as such.
    assert type(options.weights.scale) is float
    assert repr(options) == repr(PLAIN)
    selection: Any = options.selection
    assert [type(selection.top_k), type(selection.group_top_two)] == [int, bool]


def test_gradient_selections() -> None:
    assert ruda.MoeGradientSelection(input=np.True_).input is True  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids", [np.zeros((3, 2), np.int64), [[0, 1], [2, 3]], ((0, 1),), np.zeros(10**6)]
)
def test_bare_ids_are_told_where_they_go(ids: Any) -> None:
    with pytest.raises(ruda.ConfigurationError) as caught:
        ruda.MoeOptions(selection=ids, weights=PLAIN.weights)
    message = str(caught.value)
    assert "FixedSelection(ids)" in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(
    "call",
    [
        lambda value: ruda.SoftmaxSelection(value),
        lambda value: ruda.RouterWeightOptions(value, renormalize=True),
        lambda value: ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=value),
        lambda value: ruda.RouterWeightOptions(
            ruda.RouterScoring.SOFTMAX, renormalize=True, scale=value
        ),
        lambda value: ruda.MoeOptions(selection=PLAIN.selection, weights=value),
        lambda value: ruda.get_backend(value),
        lambda value: ruda.parse_dtype(value),
    ],
)
def test_a_long_value_is_cut(call: Any) -> None:
    with pytest.raises(ruda.MoeError) as caught:
        call("x" * 10**6 + "\n")
    message = str(caught.value)
    assert len(message) < 400
    assert "\n" not in message


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_shown() -> None:
    assert shown(2.5) == "2.5"
    assert shown(np.zeros((40, 40))).startswith("array([[0., 0.")
    assert len(shown(list(range(10**5)))) == 200
    assert shown(Broken()) == "a Broken"
    assert shown(10**5000) == "a int"
