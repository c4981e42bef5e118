"""Triton where it is installed; without it the package still imports and only a launch is refused.

Kernels of this package run in two ways: compiled for a GPU, or interpreted on the CPU when TRITON_INTERPRET=1 was in
the environment before triton was imported first (`make test-kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vtoken.core.errors import UnsupportedError

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installations need none
    triton = tl = None

__all__ = ["interpreted", "jit", "next_power_of_2", "require_triton", "tl"]


def jit(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, or the plain function where triton is missing. Names are arguments that vary from call to call:
    no variant is compiled for their values.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        return kernel if triton is None else triton.jit(do_not_specialize=list(do_not_specialize))(kernel)

    return decorate


def interpreted() -> bool:
    """Whether kernels run in the interpreter."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def require_triton(device: torch.device) -> None:
    """Refuse tensors that no kernel can run on.

    Raises:
        UnsupportedError: triton is missing, or the tensors are on the CPU without the interpreter.
    """
    if triton is None:
        raise UnsupportedError("the CUDA path needs triton, which comes with torch for CUDA: install vtoken[gpu].")
    if device.type != "cuda" and not interpreted():
        raise UnsupportedError(
            f"Triton kernels run on cuda, and the tensors are on {device}. On a CPU set TRITON_INTERPRET=1 before "
            "Python starts (for tests only: it is thousands of times slower)."
        )


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
