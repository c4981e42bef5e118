"""What every test here needs: a card. `make test-gpu` runs them; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch

from vtoken.device.triton_lang import interpreted

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
    pytest.mark.skipif(interpreted(), reason="kernels are interpreted: unset TRITON_INTERPRET"),
]
