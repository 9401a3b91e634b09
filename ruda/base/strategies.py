"""How a backend may be asked to compute, and the question whether it can (contract 8)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ruda.base.dtypes import DType


class ExpertStrategy(Enum):
    """How expert products are computed (contract 8)."""

    SCALAR = "scalar"
    TENSOR_CORE = "tensor_core"
    AUTO = "auto"


class CombineGradientStrategy(Enum):
    """How the gradient of one routing weight is reduced (contract 8)."""

    SERIAL = "serial"
    PLANE = "plane"


@dataclass(frozen=True)
class Request:
    """What a backend is asked whether it can serve: any of a strategy, a dtype, a device."""

    strategy: ExpertStrategy | CombineGradientStrategy | None = None
    dtype: DType | None = None
    device: str | None = None
