"""What all wrappers of one model must agree on, and get, once their root is known."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sharding.attributes import UnitAttributes
from sharding.engine.precision import cast_buffers
from sharding.engine.unit import Phase
from sharding.flat.tree import clean_name
from sharding.flat.unit import FlatUnit

__all__ = ["cast_all_buffers", "check_agreement", "members_text", "not_to_move"]


def check_agreement(wrappers: Sequence[UnitAttributes]) -> None:
    """Raise ValueError when wrappers disagree on what a model can only have once, RuntimeError when
    shards have left the device that their wrapper was made for.
    """
    for name in ("use_orig_params", "limit_all_gathers", "evaluates_in_full_precision"):
        values = {getattr(wrapper.fsdp_unit.settings, name) for wrapper in wrappers}
        if len(values) > 1:
            raise ValueError(f"{name} must be the same for all units, got {sorted(values)}")
    for wrapper in wrappers:
        _check_device(wrapper.fsdp_unit)


def _check_device(unit: FlatUnit) -> None:
    if unit.store is None:
        return
    wanted = torch.device("cpu") if unit.settings.offload else unit.settings.device
    if unit.store.flat.device != wanted:
        raise RuntimeError(
            f"sharded parameters of {type(unit.wrapped).__name__} are on "
            f"{unit.store.flat.device}, expected {wanted}; pass device_id, and do not move the "
            "module after wrapping"
        )


def members_text(unit: FlatUnit, path: str = "") -> str:
    """The unit by its module, at `path`, and members, for errors."""
    items = () if unit.store is None else unit.store.module_params
    fqns = [clean_name(f"{path}.{item.fqn}" if path else item.fqn) for item in items]
    return f"{type(unit.wrapped).__name__} with {', '.join(fqns)}"


def not_to_move(units: Sequence[FlatUnit]) -> list[FlatUnit]:
    """Those of `units` whose root is one of them, or in an iteration. Others may get another root:
    a module that was trained is wrapped again.
    """
    held = []
    for unit in units:
        if unit.runtime is not None:
            unit.runtime.leave_failed_backward()
            root = unit.runtime.root
            if root in units or root.phase is not Phase.IDLE:
                held.append(unit)
    return held


def cast_all_buffers(wrappers: Sequence[UnitAttributes], *, low: bool) -> None:
    """Cast buffers, each as the innermost unit around it says; back to what they were unless
    `low`.
    """
    done: set[int] = set()
    # Inner wrappers first: outer ones leave alone what these have cast.
    for wrapper in reversed(wrappers):
        settings = wrapper.fsdp_unit.settings
        for prefix, module in wrapper.fsdp_unit.wrapped.named_modules():
            if id(module) in done:
                continue
            done.add(id(module))
            base = f"{prefix}." if prefix else ""
            wanted = {
                name: settings.precision.buffer_dtype
                if low
                else wrapper.fsdp_buffer_dtypes.get(clean_name(f"{base}{name}"))
                for name, _ in module.named_buffers(recurse=False)
                if f"{base}{name}" not in settings.ignored_buffers
            }
            cast_buffers(module, wanted, settings.device)
