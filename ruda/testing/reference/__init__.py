"""The branch from the contract alone, exactly or in the contract's own types (contract 11)."""

from ruda.testing.reference.arithmetic import Arithmetic
from ruda.testing.reference.branch import Gradients, ReferenceResult, reference_layer
from ruda.testing.reference.router import (
    reference_selection,
    reference_weights,
    reference_weights_backward,
)

__all__ = [
    "Arithmetic",
    "Gradients",
    "ReferenceResult",
    "reference_layer",
    "reference_selection",
    "reference_weights",
    "reference_weights_backward",
]
