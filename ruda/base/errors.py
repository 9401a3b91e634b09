"""Every error `ruda` raises: a `MoeError`, and the built-in a Python user would catch."""

from __future__ import annotations


class MoeError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(MoeError, ValueError):
    """Options that cannot work, alone or with the given operands (contract 2, 3)."""


class ShapeError(MoeError, ValueError):
    """An operand has the wrong rank or extent (contract 1)."""


class DTypeError(MoeError, TypeError):
    """An operand has an element type the contract does not allow there (contract 1)."""


class DeviceError(MoeError, ValueError):
    """Operands live on different devices, or on one the backend does not serve (contract 9)."""


class BackendMismatchError(MoeError, TypeError):
    """Operands belong to different backends, or to none (contract 9)."""


class SelectionError(MoeError, ValueError):
    """An expert id lies outside [0, E) (contract 2)."""


class UnsupportedStrategyError(MoeError, ValueError):
    """The backend cannot serve the requested strategy (contract 8)."""


class StateError(MoeError, ValueError):
    """A state is asked for what it does not hold, or its operands were changed (contract 7)."""


class HigherDerivativeUnsupportedError(MoeError, ValueError):
    """A second derivative of the branch was asked for (contract 7)."""


class UnknownBackendError(MoeError, LookupError):
    """No backend, or more than one, is registered under a name."""


class BackendUnavailableError(MoeError, ImportError):
    """A known backend cannot be used here; the message says why and what would mend it."""


class IncompleteBackendError(MoeError, TypeError):
    """A backend class lacks required operations; the message lists them."""
