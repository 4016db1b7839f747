"""What `load_state_dict` takes, and what errors say, held against torch's class on the same ranks.

Method: the same calls on both classes over gloo; results are compared by value, refusals by class.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import StateDictType

import sharding
from ckpt.errors import Mismatch
from ckpt.state_dict.api import load_model_state_dict, model_state_dict
from tests.sharding.fully_scenarios import claims
from tests.sharding.models import build, engine, full_copies, wrapped

BOTH = ("torch", "ours")
FORMS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
Ours = sharding.FullyShardedDataParallel
LACKING = re.compile(r"rename=|skip=|rank0_only=|cast=")


def set_form(model: Any, form: str) -> None:
    type(model).set_state_dict_type(model, StateDictType[form])


def taken(model: Any, form: str) -> dict[str, Any]:
    set_form(model, form)
    state_dict: dict[str, Any] = model.state_dict()
    return state_dict


def other_values(name: str, form: str, dtype: torch.dtype, orig: bool) -> dict[str, Any]:
    """A state dict of the form, in which tensors have another dtype than the model's."""
    model = wrapped(name, build("batch_norm", seed=3).to(dtype), use_orig_params=orig)
    return taken(model, form)


def other_dtypes_are_cast_as_copy_does() -> None:
    for form, orig, dtype in itertools.product(
        FORMS, (False, True), (torch.float64, torch.bfloat16)
    ):
        if form == "LOCAL_STATE_DICT" and orig:
            continue  # not sound in torch's class
        loaded = []
        for name in BOTH:
            model = wrapped(name, build("batch_norm"), use_orig_params=orig)
            set_form(model, form)
            model.load_state_dict(other_values(name, form, dtype, orig))
            params = full_copies(model)
            buffers = {n: b.clone() for n, b in model.named_buffers()}
            loaded.append((params, buffers))
        for ours, torchs in zip(loaded[1], loaded[0], strict=True):
            assert ours.keys() == torchs.keys()
            for key, value in torchs.items():
                assert ours[key].dtype is value.dtype is not dtype, (form, orig, dtype, key)
                assert torch.equal(ours[key], value), (form, orig, dtype, key)


def old_scalars_of_one_element_are_taken() -> None:
    for name in BOTH:
        model = wrapped(name, build("batch_norm"))
        full = taken(model, "FULL_STATE_DICT")
        counter = next(key for key in full if key.endswith("num_batches_tracked"))
        full[counter] = torch.tensor([5.0])
        model.load_state_dict(full)
        assert int(taken(model, "FULL_STATE_DICT")[counter]) == 5, name


def public_loads_cast_only_on_request() -> None:
    model = wrapped("ours", build("uneven"))
    low = {key: value.bfloat16() for key, value in model_state_dict(model).items()}
    with pytest.raises(Mismatch, match=r"pass cast=True") as failed:
        load_model_state_dict(model, low)
    assert "skip=" not in str(failed.value)
    load_model_state_dict(model, low, cast=True)
    for key, value in model_state_dict(model).items():
        assert value.dtype is torch.float32 and torch.equal(value, low[key].float())


def errors_advise_only_what_the_method_has() -> None:
    model = wrapped("ours", build("batch_norm"))
    full = taken(model, "FULL_STATE_DICT")
    name = next(iter(full))
    wrong: list[dict[str, Any]] = [
        {key: value for key, value in full.items() if key != name},
        {**full, "surplus": torch.ones(3)},
        {**full, name: torch.ones(3)},
        {**full, name: "a value"},
        {**full, "surplus._extra_state": 3},
        full if torch.distributed.get_rank() else {**full, "one_rank_only": torch.ones(1)},
    ]
    for state_dict in wrong:
        with pytest.raises(RuntimeError) as failed:
            model.load_state_dict(state_dict)
        assert not LACKING.search(str(failed.value)), str(failed.value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    good = Ours.optim_state_dict(model, optimizer)
    param = next(iter(good["state"]))
    gone = {
        "state": {key: state for key, state in good["state"].items() if key != param},
        "param_groups": [
            {**group, "params": [key for key in group["params"] if key != param]}
            for group in good["param_groups"]
        ],
    }
    more = {
        "state": good["state"],
        "param_groups": [
            {**group, "params": [*group["params"], "other.weight"]}
            for group in good["param_groups"]
        ],
    }
    renamed = {
        "state": good["state"],
        "param_groups": [
            {("momentum" if key == "betas" else key): item for key, item in group.items()}
            for group in good["param_groups"]
        ],
    }
    refused = 0
    for wrong_optim in (gone, more, renamed):
        for call in (
            lambda given: Ours.optim_state_dict_to_load(model, optimizer, given),
            lambda given: Ours.shard_full_optim_state_dict(given, model, optim=optimizer),
        ):
            try:
                call(wrong_optim)
            except (RuntimeError, ValueError) as error:
                refused += 1
                assert not LACKING.search(str(error)), str(error)
                assert "strict=" not in str(error), str(error)
    assert refused >= 4


def arguments_of_another_class_are_refused() -> None:
    for wrong in (
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": 0},
        {"cpu_offload": True},
        {"mixed_precision": torch.bfloat16},
        {"backward_prefetch": "BACKWARD_PRE"},
    ):
        (argument,) = wrong
        with pytest.raises(TypeError, match=argument):
            engine("ours")(nn.Linear(4, 4), **wrong)


test_on_two_ranks = claims(
    2,
    [
        other_dtypes_are_cast_as_copy_does,
        old_scalars_of_one_element_are_taken,
        public_loads_cast_only_on_request,
        errors_advise_only_what_the_method_has,
        arguments_of_another_class_are_refused,
    ],
)
