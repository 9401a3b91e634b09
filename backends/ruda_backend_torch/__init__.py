"""The PyTorch backend: float16, bfloat16, float32 and float64 on the CPU and on CUDA devices."""

from ruda_backend_torch.backend import TorchBackend

__all__ = ["TorchBackend"]
