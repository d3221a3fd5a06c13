"""Where tests compute: on the CPU, or with PYPS_TEST_DEVICE=cuda on a GPU what is not of the CPU by itself.

needs_cuda marks a test that is about a GPU; ON_BOTH are the devices of one that is the same on both.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("PYPS_TEST_DEVICE", "cpu"))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_BOTH = ["cpu", pytest.param("cuda", marks=needs_cuda)]
