"""fp64 throughout, for tests that compare layouts to 1e-12.

Hugging Face's code casts to fp32 in places (norms, softmax, rotary tables) whatever the model's dtype. In an fp64 model each such
cast rounds at 1e-7, and two layouts that sum in a different order occasionally land on different sides of a rounding boundary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Fp32MeansFp64(TorchFunctionMode):
    """Inside, torch functions asked for fp32 return fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)
