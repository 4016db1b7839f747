"""State dicts of optimizers change from ids to names and back; torch's own loading is the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import Mismatch
from ckpt.state_dict.keys import rekey_optimizer_state_dict


def trained(seed: int, *, reverse: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups: list[Any] = [
        {"params": list(module[0].parameters()), "lr": 0.5},
        {"params": list(module[1].parameters()), "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups[::-1] if reverse else groups)
    loss: Any = module(torch.ones(2, 3)).sum()
    loss.backward()
    optimizer.step()
    return module, optimizer


def test_ids_become_names_and_back() -> None:
    module, optimizer = trained(0)
    by_id = optimizer.state_dict()
    by_name = rekey_optimizer_state_dict(by_id, "fqn", module, optimizer)
    assert list(by_name["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert by_name["param_groups"][1]["params"] == ["1.weight", "1.bias"]
    assert by_name["param_groups"][0]["lr"] == 0.5
    assert by_name["state"]["1.bias"] is by_id["state"][3]
    assert rekey_optimizer_state_dict(by_name, "id", module, optimizer) == by_id
    assert rekey_optimizer_state_dict(by_name, "fqn", module, optimizer) == by_name
    assert rekey_optimizer_state_dict(by_id, "id", module, optimizer) == by_id


def test_names_give_the_ids_of_another_order_of_parameters() -> None:
    module, optimizer = trained(0)
    other, reversed_optimizer = trained(1, reverse=True)
    by_name = rekey_optimizer_state_dict(optimizer.state_dict(), "fqn", module, optimizer)
    by_id = rekey_optimizer_state_dict(by_name, "id", other, reversed_optimizer)
    assert [group["params"] for group in by_id["param_groups"]] == [[0, 1], [2, 3]]
    assert [group["lr"] for group in by_id["param_groups"]] == [0.25, 0.5]
    assert by_id["state"][0] is by_name["state"]["1.weight"]
    reversed_optimizer.load_state_dict(by_id)
    loaded = reversed_optimizer.state[other[0].bias]
    assert torch.equal(loaded["exp_avg"], optimizer.state[module[0].bias]["exp_avg"])


def test_ids_ascend_in_whatever_order_the_names_are() -> None:
    module, optimizer = trained(0)
    by_id = optimizer.state_dict()
    by_name = rekey_optimizer_state_dict(by_id, "fqn", module, optimizer)
    for group in by_name["param_groups"]:
        group["params"].reverse()
    assert rekey_optimizer_state_dict(by_name, "id", module, optimizer) == by_id


def test_groups_that_would_load_into_other_parameters_are_refused() -> None:
    module, optimizer = trained(0)
    by_name = rekey_optimizer_state_dict(optimizer.state_dict(), "fqn", module, optimizer)
    first, second = by_name["param_groups"]
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]
    with pytest.raises(Mismatch, match=r"param group 0: .* has 0.bias, 1.weight, the optimizer 0."):
        rekey_optimizer_state_dict(by_name, "id", module, optimizer)
    by_name["param_groups"] = [{**first, "params": first["params"] + second["params"]}]
    by_id = rekey_optimizer_state_dict(by_name, "id", module, optimizer)
    assert by_id["param_groups"][0]["params"] == [0, 1, 2, 3]  # one group: refused when loaded


def test_keys_of_both_kinds_and_unknown_keys_are_refused() -> None:
    module, optimizer = trained(0)
    state_dict = optimizer.state_dict()
    mixed = {**state_dict, "state": {**state_dict["state"], "0.weight": {}}}
    with pytest.raises(Mismatch, match="types int, str"):
        rekey_optimizer_state_dict(mixed, "fqn", module, optimizer)
    unknown = {**state_dict, "state": {7: {}}}
    with pytest.raises(Mismatch, match="7: the optimizer of this model has no such parameter"):
        rekey_optimizer_state_dict(unknown, "fqn", module, optimizer)
    with pytest.raises(Mismatch, match=r"parameter 0: of shape .* is not in the model"):
        rekey_optimizer_state_dict(state_dict, "fqn", nn.Linear(1, 1), optimizer)
