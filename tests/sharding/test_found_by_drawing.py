"""What random draws found (`tests/differential`), one small case each, that later changes keep it.

Method: the same calls on both classes over gloo; what they give, and whether they refuse, compared.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchClass
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import sharding
from tests.sharding.fully_scenarios import claims
from tests.sharding.models import WIDTH, build, engine, full_copies, wrapped

BOTH = ("torch", "ours")
FORMS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
Ours = sharding.FullyShardedDataParallel
BF16 = torch.bfloat16


class Scale(nn.Module):
    """One parameter of one dim."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, size + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.sum()


def state(model: Any, form: str = "FULL_STATE_DICT") -> dict[str, Any]:
    type(model).set_state_dict_type(model, StateDictType[form])
    state_dict: dict[str, Any] = model.state_dict()
    return state_dict


def loads(model: Any, given: dict[str, Any], *, strict: bool = True) -> Any:
    """The missing and unexpected keys, or the name of the exception."""
    type(model).set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    try:
        keys = model.load_state_dict(given, strict=strict)
    except Exception as error:
        return type(error).__name__
    return keys.missing_keys, keys.unexpected_keys


def a_unit_around_one_vector_names_it_in_state_dicts() -> None:
    # Of one element: a rank's part has the shape of the member. Unsharded: so has any vector.
    cases = ((1, "FULL_SHARD"), (6, "FULL_SHARD"), (6, "NO_SHARD"))
    for (size, strategy), form in itertools.product(cases, FORMS):
        for name in BOTH:
            model: Any = nn.Sequential(Scale(size), nn.Linear(WIDTH, WIDTH))
            names = list(model.state_dict())
            wrap = functools.partial(engine(name), sharding_strategy=how(strategy))
            model[0] = wrap(model[0])
            root = wrap(model)
            taken = state(root, form)
            assert list(taken) == names, (name, size, strategy, form, list(taken))
            optimizer = torch.optim.SGD(root.parameters(), lr=0.1, momentum=0.9)
            root(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            keys = type(root).optim_state_dict(root, optimizer)["state"].keys()
            assert keys == set(names), (name, size, strategy, form, keys)


def tied_pair() -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def a_weight_tied_across_units_is_refused_where_it_is_wrapped() -> None:
    for orig in (False, True):
        wrap = functools.partial(Ours, use_orig_params=orig)
        model = tied_pair()
        model[0] = wrap(model[0])
        with pytest.raises(ValueError, match=r"2\.weight: is tied to"):
            wrap(model)  # its own layer has the weight of an inner unit
        model = tied_pair()
        model[0] = wrap(model[0])
        with pytest.raises(ValueError, match="weight: is tied to"):
            wrap(model[2])  # beside each other
        wrap(tied_pair())  # within one unit it is served


def a_wrong_shape_under_a_tied_name_is_refused() -> None:
    for key, strict in itertools.product(("1.first.weight", "1.second.weight"), (True, False)):
        outcomes = []
        for name in BOTH:
            model = wrapped(name, build("tied"))
            given = {**state(model), key: torch.ones(9, 9)}
            outcomes.append(loads(model, given, strict=strict))
        assert outcomes == ["RuntimeError", "RuntimeError"], (key, strict, outcomes)


def every_name_of_a_tied_weight_is_wanted() -> None:
    for key, strict in itertools.product(("1.first.weight", "1.second.weight"), (True, False)):
        outcomes = []
        for name in BOTH:
            model = wrapped(name, build("tied"))
            given = state(model)
            value = given[key] + 1.0
            given = {k: v + 1.0 for k, v in given.items() if k != key}
            outcomes.append(loads(model, given, strict=strict))
            if not strict:  # the other name gave it its value
                kept = full_copies(model)["1.first.weight"]
                torch.testing.assert_close(kept, value, msg=f"{name} {key}")
        wanted = "RuntimeError" if strict else ([key], [])
        assert outcomes == [wanted, wanted], (key, outcomes)


def missing_keys_come_in_the_order_of_the_model() -> None:
    for kind in ("tied", "batch_norm", "uneven"):
        outcomes = []
        for name in BOTH:
            model = wrapped(name, build(kind))
            given = state(model)
            last = list(given)[-1]
            outcomes.append(loads(model, {last: given[last]}, strict=False))
        assert outcomes[0] == outcomes[1], (kind, outcomes)
        assert len(outcomes[0][0]) > 4, outcomes


def dicts_without_norm_counters_load_as_norms_load_them() -> None:
    for has_metadata, strict in itertools.product((False, True), (False, True)):
        outcomes, counted = [], []
        for name in BOTH:
            model = wrapped(name, build("batch_norm"))
            model(torch.ones(3, WIDTH) * torch.arange(3.0).unsqueeze(1))
            given: Any = state(model)
            (counter,) = [key for key in given if key.endswith("num_batches_tracked")]
            del given[counter]
            given = given if has_metadata else dict(given)
            outcomes.append(loads(model, given, strict=strict))
            counted.append(int(state(model)[counter]))
        assert outcomes[0] == outcomes[1], (has_metadata, strict, outcomes)
        assert counted[0] == counted[1] == 1, counted
        lacks = "RuntimeError" if strict else ([counter], [])
        assert outcomes[0] == (lacks if has_metadata else ([], [])), outcomes


def how(strategy: str) -> ShardingStrategy:
    return ShardingStrategy[strategy]


def shown_after_no_sync(name: str, strategy: str, **kwargs: Any) -> list[Any]:
    model = wrapped(name, build("uneven"), sharding_strategy=how(strategy), **kwargs)
    with model.no_sync():
        model(torch.ones(2, WIDTH)).sum().backward()
    return shown(model)


def shown(model: Any) -> list[Any]:
    return [(key, tuple(param.shape), param.dtype) for key, param in model.named_parameters()]


def optimizers_find_their_parameters_after_a_backward_in_no_sync() -> None:
    for strategy, orig in itertools.product(("SHARD_GRAD_OP", "NO_SHARD"), (False, True)):
        both = [shown_after_no_sync(name, strategy, use_orig_params=orig) for name in BOTH]
        assert both[0] == both[1], (strategy, orig, both)
        # torch's class fails here with original parameters: held against those of a fresh model.
        low: Any = {"use_orig_params": orig, "mixed_precision": MixedPrecision(param_dtype=BF16)}
        ours = shown_after_no_sync("ours", strategy, **low)
        fresh = shown(wrapped("ours", build("uneven"), sharding_strategy=how(strategy), **low))
        assert ours == fresh, (strategy, orig, ours)


def units_by_size(name: str, kind: type[nn.Module], precision: Any) -> list[str]:
    low = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(WIDTH), nn.Linear(WIDTH, 1))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=low_size(low))
    model = nn.Sequential(low, nn.Linear(1, 1))
    root: Any = engine(name)(model, auto_wrap_policy=policy, mixed_precision=precision)
    cls: Any = TorchClass if name == "torch" else Ours
    units = {id(unit) for unit in cls.fsdp_modules(root)}
    return [path for path, module in root.named_modules() if id(module) in units]


def low_size(module: nn.Module) -> int:
    """A little more than what is left of it without its norm."""
    return sum(param.numel() for param in module.parameters()) - 1


def policies_by_size_leave_out_norms_that_become_units_themselves() -> None:
    for kind in (nn.BatchNorm1d, nn.LayerNorm, nn.Identity):
        counts = []
        for precision in (None, MixedPrecision(param_dtype=BF16)):
            units = [units_by_size(name, kind, precision) for name in BOTH]
            assert units[0] == units[1], (kind, precision, units)
            counts.append(units[1])
        if kind is nn.BatchNorm1d:
            assert counts[0] != counts[1], counts


def ignored_norms_over_the_batch_compute_in_their_own_dtype() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    seen = []
    for name in BOTH:
        norm = nn.BatchNorm1d(WIDTH)
        dtypes: list[torch.dtype] = []
        model = engine(name)(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)),
            auto_wrap_policy=policy,
            ignored_modules=[norm],
            mixed_precision=MixedPrecision(param_dtype=BF16),
        )
        # Behind the hooks that cast; what the next module gets is cast back.
        norm.register_forward_pre_hook(lambda _, args, to=dtypes: to.append(args[0].dtype))
        norm.register_forward_hook(lambda _, args, out, to=dtypes: to.append(out.dtype))
        model(torch.ones(3, WIDTH))
        seen.append(dtypes)
    assert seen[0] == seen[1] == [torch.float32, BF16], seen


def norms_of_a_model_in_low_precision_compute_in_its_dtype() -> None:
    """torch gives them float32, and they fail."""
    for orig in (False, True):
        norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        dtypes: list[torch.dtype] = []
        bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 1)).bfloat16()
        model = engine("ours")(
            bare,
            auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
            mixed_precision=MixedPrecision(param_dtype=torch.float16),
            use_orig_params=orig,
        )
        norm.register_forward_pre_hook(lambda _, args, to=dtypes: to.append(args[0].dtype))
        model(torch.ones(3, WIDTH).bfloat16()).sum().backward()
        assert dtypes == [BF16]


def names_are_bare_in_summon_under_a_root_without_parameters() -> None:
    for orig in (False, True):
        names = []
        for name in BOTH:
            model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), build("uneven"))
            for index in (0, 1):
                model[index] = engine(name)(model[index], use_orig_params=orig)
            root = engine(name)(model, use_orig_params=orig)
            with type(root).summon_full_params(root):
                names.append([key for key, _ in root.named_parameters()])
            # Only there: outside the names are those of the wrappers, or bare in both.
            names.append([key for key, _ in root.named_parameters()])
        assert names[:2] == names[2:], (orig, names)
        assert names[0][0] == "0.weight", names


def a_root_without_parameters_may_be_summoned_with_offload_under_no_sharding() -> None:
    """Its units inside may not."""
    for name in BOTH:
        strategy = ShardingStrategy.NO_SHARD
        inner = engine(name)(nn.Linear(WIDTH, WIDTH), sharding_strategy=strategy)
        root = engine(name)(nn.Sequential(inner), sharding_strategy=strategy)
        options = {"offload_to_cpu": True, "rank0_only": True, "writeback": False}
        with type(root).summon_full_params(root, recurse=False, **options):
            pass
        with pytest.raises(NotImplementedError), type(root).summon_full_params(root, **options):
            pass


def state_dicts_cast_back_only_buffers_that_mixed_precision_casts() -> None:
    precisions = (None, MixedPrecision(param_dtype=BF16), MixedPrecision(buffer_dtype=BF16))
    for precision, to in itertools.product(precisions, (None, torch.float64)):
        dtypes: list[Any] = []
        for name in BOTH:
            model = wrapped(name, build("batch_norm"), mixed_precision=precision)
            if to is not None:
                model.to(to)
            dtypes.append({key: value.dtype for key, value in state(model).items()})
        assert dtypes[0] == dtypes[1], (precision, to, dtypes)
    assert dtypes[1]["1.1.running_mean"] is torch.float32, dtypes
    converted: Callable[[], Any] = lambda: wrapped("ours", build("batch_norm")).to(torch.float64)  # noqa: E731
    assert state(converted())["1.1.running_mean"].dtype is torch.float64


class Keyed(torch.optim.SGD):
    """An optimizer whose state dict is keyed by names."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__(list(model.parameters()), lr=0.1, momentum=0.9)
        self.names = dict(enumerate(names))

    def state_dict(self) -> dict[str, Any]:
        return self._keyed(super().state_dict(), self.names)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {name: number for number, name in self.names.items()}
        super().load_state_dict(self._keyed(state_dict, numbers))

    def _keyed(self, given: dict[str, Any], keys: Any) -> dict[str, Any]:
        groups = [
            {**g, "params": [keys[key] for key in g["params"]]} for g in given["param_groups"]
        ]
        state = {keys[key]: value for key, value in given["state"].items()}
        return {"state": state, "param_groups": groups}


def bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def stepped(model: Any, names: list[str]) -> Keyed:
    optimizer = Keyed(model, names)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    for param in model.parameters():  # such optimizers have state of all parameters from the start
        optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
    return optimizer


def optimizers_keyed_by_names_go_out_and_in_by_the_names_they_use() -> None:
    for orig, name, spelled in (
        *itertools.product((False, True), BOTH, (str,)),
        (False, "ours", bare),
        (True, "ours", bare),
    ):
        where = (orig, name, spelled)
        model = wrapped(name, build("uneven"), use_orig_params=orig)
        cls: Any = TorchClass if name == "torch" else Ours
        names = [spelled(key) for key, _ in model.named_parameters()]
        optimizer = stepped(model, names)
        given = copy.deepcopy(optimizer.state_dict())
        taken = cls.optim_state_dict(model, optimizer, given)
        assert taken["state"].keys() == build("uneven").state_dict().keys(), where
        to_load = cls.optim_state_dict_to_load(model, optimizer, taken, is_named_optimizer=True)
        # Also members without elements here: such optimizers want an entry for each.
        assert to_load["state"].keys() == given["state"].keys() == set(names), where
        for key, value in given["state"].items():
            kept = to_load["state"][key]["momentum_buffer"]
            assert torch.equal(kept, value["momentum_buffer"]), (where, key)
        assert {*to_load["param_groups"][0]["params"]} == set(names), where
        if name == "ours":
            for value in optimizer.state.values():
                value["momentum_buffer"].zero_()
            Ours.optim_state_dict_to_load(model, optimizer, taken, True, load_directly=True)
            now = optimizer.state_dict()["state"]
            for key, value in given["state"].items():
                assert torch.equal(now[key]["momentum_buffer"], value["momentum_buffer"]), where


def names_that_are_no_parameters_are_refused() -> None:
    for orig in (False, True):
        model = wrapped("ours", build("uneven"), use_orig_params=orig)
        names = [f"other.{bare(key)}" for key, _ in model.named_parameters()]
        optimizer = stepped(model, names)
        taken = Ours.optim_state_dict(model, optimizer)
        with pytest.raises(ValueError, match=r"no such key, it has \['other\."):
            Ours.optim_state_dict_to_load(model, optimizer, taken, is_named_optimizer=True)
        with pytest.raises(RuntimeError, match=r"other\."):
            Ours.optim_state_dict(model, optimizer, optimizer.state_dict())
    # A tied weight has two names, of which torch's class takes none.
    model = wrapped("ours", build("tied"), use_orig_params=True)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, WIDTH)).sum().backward()
    plain.step()
    taken = Ours.optim_state_dict(model, plain)
    to_load = Ours.optim_state_dict_to_load(model, plain, taken, is_named_optimizer=True)
    assert {*to_load["param_groups"][0]["params"]} == {key for key, _ in model.named_parameters()}


def whole_models_are_clipped_in_the_order_of_their_parameters() -> None:
    """The sum of norms of several parameters has other last bits in another order."""
    norms = {}
    for name in BOTH:
        layers = [nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(3)]
        model = engine(name)(
            nn.Sequential(*layers),
            ignored_modules=[layers[0]],
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=True,
        )
        model(torch.ones(2, 2, dtype=torch.float64)).sum().backward()
        for param, norm in zip(model.parameters(), (1e16, 1.0, 1.0), strict=True):
            param.grad.zero_()[0, 0] = norm
        norms[name] = model.clip_grad_norm_(1.0, norm_type=1.0).item()
    assert norms["ours"] == norms["torch"]


test_on_two_ranks = claims(
    2,
    [
        a_unit_around_one_vector_names_it_in_state_dicts,
        a_weight_tied_across_units_is_refused_where_it_is_wrapped,
        a_wrong_shape_under_a_tied_name_is_refused,
        every_name_of_a_tied_weight_is_wanted,
        missing_keys_come_in_the_order_of_the_model,
        dicts_without_norm_counters_load_as_norms_load_them,
        optimizers_find_their_parameters_after_a_backward_in_no_sync,
        policies_by_size_leave_out_norms_that_become_units_themselves,
        ignored_norms_over_the_batch_compute_in_their_own_dtype,
        norms_of_a_model_in_low_precision_compute_in_its_dtype,
        names_are_bare_in_summon_under_a_root_without_parameters,
        a_root_without_parameters_may_be_summoned_with_offload_under_no_sharding,
        state_dicts_cast_back_only_buffers_that_mixed_precision_casts,
        optimizers_keyed_by_names_go_out_and_in_by_the_names_they_use,
        names_that_are_no_parameters_are_refused,
        whole_models_are_clipped_in_the_order_of_their_parameters,
    ],
)
