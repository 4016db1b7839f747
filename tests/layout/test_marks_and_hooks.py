"""Small facts that descriptions rest on: what is whole, what changed, whose hook it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.layout.memory import is_plain_memory
from ckpt.layout.piece import Owned, Piece, View, Window
from ckpt.layout.region import Region, Shape, Span, whole
from ckpt.layout.state_dict_hooks import load_changes, overrides, save_changes
from ckpt.saving.plan import Fingerprint, add_module

ALL = whole((2, 3))


def _owned(fqn: str = "t", *, region: Region = ALL, shape: Shape = (2, 3)) -> Owned:
    local = torch.zeros(2, 3)
    piece = Piece(fqn, shape, local.dtype, region, ALL, (0, 1))
    return Owned(local, local, (View((piece,)),), True)


def test_whole_is_one_tensor_in_memory_of_its_shape() -> None:
    owned = _owned()
    (view,) = owned.views
    assert owned.is_whole
    assert owned.is_whole_on((0, 1)) and not owned.is_whole_on((0,))
    assert not _owned(region=Span(0, 6)).is_whole_on((0, 1))
    assert not _owned(region=Span(0, 6)).is_whole
    assert not _owned(shape=(4, 3)).is_whole
    assert not owned._replace(views=()).is_whole
    assert not owned._replace(views=(view, view)).is_whole
    assert not owned._replace(views=(View(view.pieces, Window((2, 3), (3, 1), 0)),)).is_whole
    both = (*view.pieces, *_owned("other").views[0].pieces)
    assert not owned._replace(views=(View(both),)).is_whole


def _marks(*tensors: torch.Tensor) -> list[Any]:
    fingerprint = Fingerprint(list(tensors))
    fingerprint.mark_memory()
    return fingerprint.marks


def test_marks_say_where_and_how_memory_lies() -> None:
    """One tensor object, whose memory is exchanged as `.data` or a load with assign does it."""
    tensor = torch.zeros(4, 4)
    before = _marks(tensor)
    tensor += 1
    assert _marks(tensor) == before
    memory = tensor.data
    for changed in (torch.zeros(4, 4), memory[:2], memory.view(2, 8), memory.t()):
        tensor.data = changed
        assert _marks(tensor) != before
        tensor.data = memory
        assert _marks(tensor) == before
    tensor.requires_grad_()
    assert _marks(tensor) != before


def test_marks_say_what_the_bits_in_memory_stand_for() -> None:
    """Another tensor in the same memory, of the same shape and strides."""
    number = torch.randn(4, dtype=torch.complex64)
    for tensor, changed in (
        (torch.zeros(4), torch.zeros(4).view(torch.int32)),
        (torch.zeros(4, dtype=torch.half), torch.zeros(4, dtype=torch.bfloat16)),
        (number, number.conj()),
        (number.imag, number.conj().imag),
    ):
        before, memory = _marks(tensor), tensor.data
        tensor.data = memory.view(changed.dtype) if changed.dtype is not memory.dtype else changed
        assert _marks(tensor) != before
        tensor.data = memory
        assert _marks(tensor) == before


class Wrapper(torch.Tensor):
    """Answers what its sizes and strides are, and nothing else."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, dtype=held.dtype, dispatch_sizes_strides_policy="sizes"
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.removeprefix("sym_")
        assert name in ("size", "stride", "dim", "numel"), name
        return getattr(args[0].held, name)()


def test_marks_ask_a_class_of_tensors_only_what_it_answers() -> None:
    held = torch.zeros(2, 3)
    before = _marks(torch.zeros(2), Wrapper(held))
    assert before != _marks(torch.zeros(2), Wrapper(held.t()))


def test_memory_that_is_not_one_is_never_the_same() -> None:
    tensor = torch.eye(2).to_sparse()
    marks = _marks(tensor)
    assert marks == marks and marks != _marks(tensor)
    assert marks[-1] is False


def _taken(module: nn.Module) -> Fingerprint:
    fingerprint = Fingerprint()
    add_module(module, fingerprint)
    return fingerprint


def test_every_tensor_and_module_counts_once() -> None:
    """Empty places, as `register_parameter(name, None)` makes them, are no tensors."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    module.register_buffer("nothing", None)
    module.register_module("no_child", None)
    module.append(module[1])
    fingerprint = _taken(module)
    expected = [*module.parameters(), *module.buffers()]
    assert len(fingerprint.tensors) == len(expected) == 6
    assert {id(tensor) for tensor in fingerprint.tensors} == {id(tensor) for tensor in expected}
    assert [type(one) for one in fingerprint.objects].count(nn.BatchNorm1d) == 1
    assert len(fingerprint.objects) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_state_dict_pre_hook(lambda *args: None),
        lambda module: (
            module.register_state_dict_pre_hook(lambda *args: None),
            module._register_state_dict_hook(lambda *args: None),
        ),
        lambda module: module._register_state_dict_hook(lambda *args: None),
        lambda module: setattr(module, "__class__", type("Other", (nn.BatchNorm1d,), {})),
        lambda module: module._non_persistent_buffers_set.add("running_mean"),
        lambda module: module._parameters.update(other=module._parameters.pop("weight")),
        lambda module: module.add_module("child", None),
    ],
)
def test_marks_see_names_classes_and_hooks(change: Any) -> None:
    module = nn.BatchNorm1d(2)
    before = _taken(module).marks
    assert _taken(module).marks == before
    change(module)
    assert _taken(module).marks != before


class _Unit(nn.Linear):
    def __ckpt_pieces__(self) -> list[Owned]:
        return [_owned()]


def test_what_units_own_counts() -> None:
    """Their own memory, not what the module shows of it; every module of a class is asked."""
    units = nn.Sequential(_Unit(1, 1), _Unit(1, 1))
    fingerprint = _taken(units)
    assert len(fingerprint.objects) == 5  # three modules, and a parameter of each unit
    assert [mark for mark in fingerprint.marks if mark == (3, 1)] == [(3, 1)] * 2


def _users(*args: Any) -> None:
    pass


def _neutral(*args: Any) -> None:
    pass


_neutral.__ckpt_neutral__ = True  # type: ignore[attr-defined]


class _Hooks:
    def method(self, *args: Any) -> None:
        pass


class _Called:
    """With an attribute as torch's own wrapper of hooks has it."""

    hook = _neutral

    def __call__(self, *args: Any) -> None:
        pass


def test_hooks_are_known_through_partials_and_methods() -> None:
    """The function is what counts: it has the name, the package and the word of its engine."""
    for hook, name in (
        (_users, "_users"),
        (partial(_users, 1), "_users"),
        (partial(partial(_users, 1), 2), "_users"),
        (_Hooks().method, "_Hooks.method"),
        (partial(_Hooks().method, 1), "_Hooks.method"),
        (_Called(), "_Called"),
    ):
        module = nn.Linear(1, 1)
        module._register_state_dict_hook(hook)
        module.register_load_state_dict_post_hook(hook)
        assert save_changes(module) == load_changes(module) == [f"hook {name}"]
    for hook in (_neutral, partial(_neutral, 1), partial(nn.Linear.reset_parameters)):
        module = nn.Linear(1, 1)
        module._register_state_dict_hook(hook)
        module.register_load_state_dict_pre_hook(hook)
        module.register_load_state_dict_post_hook(hook)
        assert save_changes(module) == load_changes(module) == []


def _as_in(module: str, name: str) -> Any:
    """A hook that stands where a library has it."""

    def hook(*args: Any) -> None:
        pass

    hook.__module__, hook.__qualname__ = module, name
    return hook


def test_hooks_of_libraries_that_only_rename_old_names_change_nothing() -> None:
    """Mamba of transformers was refused under `fully_shard` for one of them."""
    mamba = "transformers.models.mamba.modeling_mamba"
    for module_of_hook, name, changes in (
        (mamba, "MambaModel.load_hook", []),
        (mamba, "MambaModel.other_hook", ["hook MambaModel.other_hook"]),
        ("mine.modeling_mamba", "MambaModel.load_hook", ["hook MambaModel.load_hook"]),
    ):
        module = nn.Linear(1, 1)
        module._register_load_state_dict_pre_hook(_as_in(module_of_hook, name))
        assert load_changes(module) == changes


def test_methods_of_libraries_that_only_rename_old_names_change_nothing() -> None:
    """torchvision's VisionTransformer was refused under `fully_shard` for one of them."""

    def kind_of(module: str, name: str) -> type[nn.Module]:
        method = _as_in(module, f"{name}._load_from_state_dict")
        return type(name, (nn.Module,), {"_load_from_state_dict": method})

    names = ("_save_to_state_dict", "_load_from_state_dict")
    theirs = "torchvision.models.vision_transformer"
    assert overrides(kind_of(theirs, "MLPBlock"), names) == ()
    for module, name in ((theirs, "Encoder"), ("mine.vision_transformer", "MLPBlock")):
        assert overrides(kind_of(module, name), names) == (f"method {name}._load_from_state_dict",)


def test_a_neutral_hook_does_not_hide_those_after_it() -> None:
    module = nn.Linear(1, 1)
    for hook in (_neutral, nn.Linear.reset_parameters, _users):
        module._register_state_dict_hook(hook)
    assert save_changes(module) == ["hook _users"]


def test_methods_that_were_replaced_are_changes() -> None:
    module: Any = nn.Linear(1, 1)
    module.state_dict = dict
    assert save_changes(module) == load_changes(module) == ["method state_dict"]


def test_plain_memory_has_the_bytes_in_their_order() -> None:
    plain = torch.zeros(2, 3)
    assert is_plain_memory(plain) and is_plain_memory(plain[1:]) and is_plain_memory(plain[0, 0])
    complex_ = torch.zeros(2, dtype=torch.complex64)
    assert is_plain_memory(complex_)
    for other in (
        plain.t(),
        plain[:, 1:],
        complex_.conj(),
        torch._neg_view(plain),
        plain.to("meta"),
    ):
        assert not is_plain_memory(other)
