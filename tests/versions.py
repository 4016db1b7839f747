"""What older versions of torch cannot do themselves, as marks."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

needs_uneven_strided_shards = pytest.mark.skipif(
    TORCH < (2, 7),
    reason="torch 2.6 refuses FSDP2 over tensor parallel of uneven sizes, and on CPU",
)
