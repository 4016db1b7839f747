"""What changes the state dict of a module: hooks, and methods that its class or the user replaced.

A state is read where it lies, so such changes would be lost; they are refused by name instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

# Hooks and overrides in these packages either belong to a wrapper that we see through, or only
# accept names and layouts of older versions.
_HARMLESS = ("torch.nn.", "torch.distributed.", "torch._dynamo.")
# Methods that rename what older versions of the class called differently, or drop a count of
# batches that it lacks. They change nothing else.
_RENAMING = (
    ("torchvision.models.vision_transformer", "MLPBlock"),
    ("torchvision.models.detection.mask_rcnn", "MaskRCNNHeads"),
    ("torchvision.models.detection.retinanet", "RetinaNetClassificationHead"),
    ("torchvision.models.detection.retinanet", "RetinaNetRegressionHead"),
    ("torchvision.models.detection.rpn", "RPNHead"),
    ("torchvision.ops.feature_pyramid_network", "FeaturePyramidNetwork"),
    ("torchvision.ops.misc", "FrozenBatchNorm2d"),
    ("timm.layers.norm_act", "FrozenBatchNormAct2d"),
)
# Most add what a parameter consists of, which is stored with it: see `ckpt.composites`.
_HARMLESS_FUNCTIONS = frozenset(
    {
        ("bitsandbytes.nn.modules", "Linear4bit._save_to_state_dict"),
        ("bitsandbytes.nn.modules", "Linear8bitLt._save_to_state_dict"),
        ("bitsandbytes.nn.modules", "Linear8bitLt._load_from_state_dict"),
        ("bitsandbytes.nn.modules", "maybe_rearrange_weight"),
        # They give names of older versions their present ones, and leave all others as they are.
        ("transformers.models.esm.modeling_esm", "EsmModel.load_hook"),
        ("transformers.models.mamba.modeling_mamba", "MambaModel.load_hook"),
        ("transformers.models.mamba2.modeling_mamba2", "Mamba2Model.load_hook"),
        *((module, f"{kind}._load_from_state_dict") for module, kind in _RENAMING),
    }
)


def save_changes(module: nn.Module) -> list[str]:
    """The hooks and replaced methods of the module object that change its state dict."""
    return _changes(module, module._state_dict_hooks, module._state_dict_pre_hooks)


def load_changes(module: nn.Module) -> list[str]:
    """The hooks and replaced methods of the module object that change a load of a state dict."""
    hooks = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    return _changes(module, *hooks)


_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
CANNOT = (
    "changes the module's state dict and cannot be honoured on sharded tensors; keep what it adds "
    "in get_extra_state() and set_extra_state(), or pass what state_dict() returns, not the module"
)


def _changes(module: nn.Module, *tables: Mapping[int, Callable[..., Any]]) -> list[str]:
    names = [f"method {name}" for name in _METHODS if name in module.__dict__]
    for table in tables:
        for hook in table.values():
            function = _function_of(hook)
            if getattr(function, "__ckpt_neutral__", False):
                continue
            place = str(getattr(function, "__module__", ""))
            name = str(getattr(function, "__qualname__", type(function).__qualname__))
            if not place.startswith(_HARMLESS) and (place, name) not in _HARMLESS_FUNCTIONS:
                names.append(f"hook {name}")
    return names


def _function_of(hook: Any) -> Any:
    """The function behind torch's own wrapper of hooks, bound methods and partials."""
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif hasattr(hook, "hook") and type(hook).__module__.startswith("torch."):
            hook = hook.hook
        elif hasattr(hook, "__func__"):
            hook = hook.__func__
        else:
            return hook


def overrides(kind: type, names: Iterable[str]) -> tuple[str, ...]:
    """Methods of the state dict that the user's own classes replace."""
    overridden = []
    for name in names:
        method = getattr(kind, name)
        place = str(getattr(method, "__module__", "")), getattr(method, "__qualname__", name)
        if not place[0].startswith(_HARMLESS) and place not in _HARMLESS_FUNCTIONS:
            overridden.append(f"method {getattr(method, '__qualname__', name)}")
    return tuple(overridden)
