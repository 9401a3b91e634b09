"""Layer files and the options in them: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ruda.base.dtypes import DType
from ruda.base.errors import ConfigurationError, MoeError
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy
from ruda.cli.parity_report import load_lines
from ruda.families.table import FAMILIES
from ruda.stages.options import (
    CombineAccumulation,
    FixedSelection,
    GroupedSelection,
    Intermediates,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    SoftmaxSelection,
)
from ruda.testing.files.atomic import DestinationError, replacing, write_text
from ruda.testing.files.layers import LayerFileError, cast_layer, read_layer, write_layer
from ruda.testing.files.options import dump_options, load_options
from ruda.testing.files.tensors import read_tensors, write_tensors
from ruda.testing.layers import Layer, random_layer
from ruda.testing.tolerance import assert_exact, assert_same_bits

WEIGHTS = RouterWeightOptions(
    RouterScoring.SQRT_SOFTPLUS, renormalize=True, scale=2.5, epsilon=1e-20
)
FIXED_IDS = np.array([[0, 1], [3, 3], [2, 0]], np.int32)
TENSORS = ("input", "logits", "gate", "up", "down", "grad_output")


def layer(dtype: DType = DType.BFLOAT16, **changes: Any) -> Layer:
    options = MoeOptions(
        selection=GroupedSelection(top_k=2, groups=2, selected_groups=1), weights=WEIGHTS
    )
    made = random_layer(
        tokens=3,
        hidden=5,
        intermediate=4,
        experts=4,
        options=options,
        dtype=dtype,
        logits_dtype=DType.FLOAT32 if dtype is not DType.FLOAT64 else dtype,
        bias=True,
        seed=2,
    )
    return replace(made, **changes)


@pytest.mark.parametrize("dtype", list(DType))
def test_layer_round_trip(tmp_path: Path, dtype: DType) -> None:
    path, made = tmp_path / "layer", layer(dtype)
    write_layer(path, made, {"family": "none"})
    read = read_layer(path)
    for name in (*TENSORS, "correction_bias"):
        assert_same_bits(name, getattr(read, name), getattr(made, name))
    assert read.options == made.options
    assert read_tensors(path)[1]["family"] == "none"


def test_layer_round_trip_with_fixed_ids(tmp_path: Path) -> None:
    options = MoeOptions(selection=FixedSelection(FIXED_IDS), weights=WEIGHTS)
    write_layer(tmp_path / "layer", layer(options=options, correction_bias=None), {})
    selection = read_layer(tmp_path / "layer").options.selection
    assert isinstance(selection, FixedSelection)
    assert_same_bits("expert_ids", selection.expert_ids, FIXED_IDS)


def test_layer_round_trip_of_strided_tensors(tmp_path: Path) -> None:
    made = layer()
    turned = replace(made, gate=np.asfortranarray(made.gate), up=made.up[:, ::-1])
    write_layer(tmp_path / "layer", turned, {})
    read = read_layer(tmp_path / "layer")
    assert_same_bits("gate", read.gate, made.gate)
    assert_same_bits("up", read.up, np.ascontiguousarray(made.up[:, ::-1]))


def test_cast_leaves_a_router_with_its_own_type_alone() -> None:
    made = layer()
    wide = cast_layer(made, DType.FLOAT64)
    assert (wide.dtype, wide.logits_dtype) == (DType.FLOAT64, DType.FLOAT32)
    assert_same_bits("logits", wide.logits, made.logits)
    same = cast_layer(replace(made, logits=made.logits.astype(made.input.dtype)), DType.FLOAT64)
    assert same.logits_dtype is DType.FLOAT64
    assert same.correction_bias is not None
    assert same.correction_bias.dtype == np.float64


@pytest.mark.parametrize("family", list(FAMILIES))
def test_options_round_trip_of_families(family: str) -> None:
    options = FAMILIES[family].options
    assert load_options(dump_options(options)) == options


def test_options_round_trip_of_every_field() -> None:
    options = MoeOptions(
        selection=GroupedSelection(3, RouterScoring.SOFTMAX, 4, 2, group_top_two=True),
        weights=WEIGHTS,
        forward=ExpertStrategy.SCALAR,
        backward=ExpertStrategy.TENSOR_CORE,
        combine_backward=CombineGradientStrategy.PLANE,
        combine=CombineAccumulation.STORAGE,
        intermediates=Intermediates.COMPUTE,
    )
    assert load_options(dump_options(options)) == options
    minimal = {
        "version": 1,
        "selection": {"kind": "softmax", "top_k": 1},
        "weights": {"scoring": "softmax", "renormalize": False},
    }
    assert load_options(json.dumps(minimal)) == MoeOptions(
        selection=SoftmaxSelection(1),
        weights=RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=False),
    )


GOOD = json.loads(dump_options(MoeOptions(selection=SoftmaxSelection(2), weights=WEIGHTS)))


def changed(**values: Any) -> str:
    return json.dumps({**GOOD, **values})


def within(key: str, **values: Any) -> str:
    return json.dumps({**GOOD, key: {**GOOD[key], **values}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "options: not valid JSON"),
        ("{", "options: not valid JSON"),
        ("[" * 100_000, "options: not valid JSON"),
        ("[]", "options: expected an object, got []"),
        ('{"version": 1, "version": 1}', "key 'version' occurs twice"),
        (changed(version=2), "options.version: expected 1"),
        (changed(capacity=1), "options: unknown key 'capacity'"),
        (json.dumps({"version": 1}), "options.selection: missing"),
        (changed(selection="softmax"), "options.selection: expected an object"),
        (
            within("selection", kind="hash"),
            "expected one of softmax, grouped, fixed, got 'hash'",
        ),
        (within("selection", kind=["softmax"]), "options.selection: kind: expected one of"),
        (changed(selection={"kind": "fixed"}), "expert_ids: missing"),
        (within("selection", groups=2), "options.selection: unknown key 'groups'"),
        (within("selection", top_k=0), "SoftmaxSelection.top_k: expected an integer >= 1, got 0"),
        (within("selection", top_k=1.0), "SoftmaxSelection.top_k"),
        (within("selection", top_k=True), "SoftmaxSelection.top_k"),
        (changed(selection={"kind": "softmax"}), "options.selection.top_k: missing"),
        (within("weights", scoring="tanh"), "sqrt_softplus (RouterScoring), got 'tanh'"),
        (within("weights", renormalize=1), "RouterWeightOptions.renormalize"),
        (within("weights", scale=0), "RouterWeightOptions.scale"),
        (within("weights", scale=float("inf")), "RouterWeightOptions.scale"),
        (within("weights", scale=10**400), "RouterWeightOptions.scale"),
        (within("weights", epsilon=float("nan")), "RouterWeightOptions.epsilon"),
        (within("weights", bias=1), "options.weights: unknown key 'bias'"),
        (
            changed(forward="fast"),
            "MoeOptions.forward: expected one of scalar, tensor_core",
        ),
        (
            changed(intermediates=None),
            "MoeOptions.intermediates: expected one of storage",
        ),
    ],
)
def test_bad_options(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_options(text)
    assert message in str(caught.value)


def test_ids_that_no_selection_asks_for() -> None:
    with pytest.raises(ConfigurationError, match="expert_ids: given"):
        load_options(json.dumps(GOOD), FIXED_IDS)


def tensors(made: Layer) -> dict[str, Any]:
    found = {name: getattr(made, name) for name in (*TENSORS, "correction_bias")}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _fixed(ids: Any) -> dict[str, Any]:
    return {"expert_ids": ids, "correction_bias": None}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        *[({name: None}, "grouped", f"{name}: missing") for name in TENSORS],
        ({"gates": np.ones(3)}, "grouped", "gates: unknown key"),
        ({"input": np.ones((3, 5), np.int32)}, "grouped", "input: expected float16"),
        ({"logits": np.ones((3, 4), np.int8)}, "grouped", "logits: expected float16"),
        ({"gate": np.ones((4, 4, 5), np.float32)}, "grouped", "gate: expected bfloat16"),
        ({"grad_output": np.ones((3, 5))}, "grouped", "grad_output: expected bfloat16"),
        ({"correction_bias": np.ones(4)}, "grouped", "correction_bias: expected float32"),
        (
            {"correction_bias": np.ones(5, "f4")},
            "grouped",
            "correction_bias: expected [E] with",
        ),
        ({"logits": np.ones((2, 4), "f4")}, "grouped", "logits: expected [T, E] with T = 3, E = 4"),
        ({"logits": np.ones(4, "f4")}, "grouped", "logits: expected [T, E]"),
        ({"logits": np.ones((3, 0), "f4")}, "grouped", "logits: expected [T, E] with T = 3, E = 4"),
        ({"logits": np.ones((3, 5), "f4")}, "grouped", "logits: expected [T, E] with T = 3, E = 4"),
        ({}, "softmax", "correction_bias: expected None with SoftmaxSelection"),
        ({}, "grouped9", "GroupedSelection.top_k: expected 1..4"),
        ({}, "fixed", "expert_ids: missing"),
        ({"expert_ids": FIXED_IDS}, "grouped", "expert_ids: given"),
        (_fixed(FIXED_IDS[:2]), "fixed", "expert_ids: expected [T, k] with T = 3, got [2, 2]"),
        (_fixed(FIXED_IDS + 1), "fixed", "expert_ids: expected ids in [0, 4), got 4"),
        (_fixed(FIXED_IDS - 1), "fixed", "expert_ids: expected ids in [0, 4), got -1"),
        (_fixed(FIXED_IDS * 1.0), "fixed", "expert_ids: expected an integer type, got float64"),
    ],
)
def test_bad_layers(tmp_path: Path, changes: dict[str, Any], kind: str, message: str) -> None:
    selection = {
        "grouped": GroupedSelection(top_k=2),
        "grouped9": GroupedSelection(top_k=9),
        "softmax": SoftmaxSelection(2),
        "fixed": FixedSelection(None),
    }[kind]
    options = dump_options(MoeOptions(selection=selection, weights=WEIGHTS))
    made = {**tensors(layer()), **changes}
    present = {name: tensor for name, tensor in made.items() if tensor is not None}
    write_tensors(tmp_path / "layer", present, {"options": options})
    with pytest.raises(LayerFileError) as caught:
        read_layer(tmp_path / "layer")
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"{tmp_path / 'layer'}: ")
    assert "\n" not in text
    assert isinstance(caught.value, MoeError)
    assert isinstance(caught.value, ValueError)


def test_byte_swapped_arrays_are_written_as_what_they_mean(tmp_path: Path) -> None:
    found = {"x": np.arange(6.0).reshape(2, 3), "ids": np.array([[1, 300]])}
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in found.items()}
    write_tensors(tmp_path / "file", {**swapped, "column": found["x"].T[::-1]}, {})
    read, _ = read_tensors(tmp_path / "file")
    for name, array in {**found, "column": found["x"].T[::-1]}.items():
        assert_exact(name, read[name], array)


def test_every_truncation_is_seen(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_layer(whole, layer(), {})
    data = whole.read_bytes()
    for length in [*range(0, 64, 7), *range(64, len(data), 97), len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(LayerFileError, match=r"cut: not a safetensors file, or a damaged one"):
            read_layer(cut)


def test_metadata_without_options(tmp_path: Path) -> None:
    write_tensors(tmp_path / "layer", tensors(layer()), {})
    with pytest.raises(LayerFileError, match="options: missing from the metadata"):
        read_layer(tmp_path / "layer")


def test_a_failed_write_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(error: type[BaseException]) -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            fail(error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_follows_links_and_keeps_permissions(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    mask = os.umask(0o027)
    try:
        write_text(tmp_path / "fresh", "x")
    finally:
        os.umask(mask)
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o640


def test_no_device_is_renamed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DestinationError, match="not a regular file"):
        write_text(tmp_path / "pipe", "x")


def test_histogram() -> None:
    load = np.array([0, 1, 8, 4] + [1] * 66)
    first, second, summary = load_lines(load, unicode=True)
    assert first.startswith("   0  ▁█▄▁")
    assert first.endswith(" 63")
    assert second == "  64 ▁▁▁▁▁▁ 69"
    assert "most 8; 1 of 70 experts idle" in summary
    assert load_lines(np.zeros(2, np.int64), unicode=False)[0] == "  0    1"
