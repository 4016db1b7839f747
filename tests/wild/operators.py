"""What torchvision needs to be imported under torch for the CPU where its wheel is for CUDA."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import library

# Kept, as the operators are gone with it.
DECLARED: list[library.Library] = []


def declare_operators() -> None:
    """Declare operators that torchvision's compiled part would declare, if that does not load.

    A wheel that was built for another kind of torch (with CUDA) does not load its compiled part
    under torch for the CPU, which torchvision accepts; but then it describes operators that nobody
    has declared, and neither it nor what imports it can be imported. No row calls them.
    """
    package = importlib.util.find_spec("torchvision")
    if DECLARED or package is None or package.origin is None:
        return
    compiled = next(Path(package.origin).parent.glob("_C*.so"), None)
    if compiled is not None:
        try:
            torch.ops.load_library(str(compiled))
            return
        except OSError:
            pass  # what it wants of torch is not there
    operators = library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    DECLARED.append(operators)
