"""PyTorch, for the faces that are modules of it, or one sentence that says how to get it."""

try:
    from torch import Tensor, from_numpy, nn
except ImportError as missing:
    from clearhead.core.installing import brings

    raise ImportError(
        f"this way of writing attention needs PyTorch, which is not installed: {brings('torch')};"
        " clearhead.textbook.chapter, course and algebra need none",
        name="torch",
    ) from missing

__all__ = ["Tensor", "from_numpy", "nn"]
