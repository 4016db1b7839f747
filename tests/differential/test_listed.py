"""What is listed is the difference that is meant, and no wrong value beside it.

Method: differences made by hand, as the comparison would find them; each entry that could hide a
wrong value gets the one that it is for, and one with a value 1 % off, of another element, or in
another place.
"""

from __future__ import annotations

import dataclasses

import torch

from tests.differential.comparing import Difference, Tensor, differences, frozen
from tests.differential.draws import Draw, Op, Part, drawn
from tests.differential.listed import listed
from tests.differential.playing import tolerance


def _seen(theirs: object, ours: object, where: str = ".local.params.a[0]") -> Difference:
    (difference,) = differences(frozen(theirs), frozen(ours), 0.0, where)
    return difference


def _draw(**changes: object) -> Draw:
    tree = (Part("linear", 3), Part("scaled", 1))
    return dataclasses.replace(drawn(1, 2), tree=tree, **changes)  # type: ignore[arg-type]


def _one(draw: Draw, difference: Difference, index: int = -1) -> bool:
    return listed(draw, draw.ops[index], difference) is not None


def test_what_is_read_after_a_forward_without_gradients_is_listed_until_the_next_backward() -> None:
    train = Op("train", {"steps": 1})
    ops = (Op("evaluate", {"train": False}), Op("step"), Op("full"), train, Op("full"))
    draw = _draw(face="flat", ops=ops, precision="none")
    shown = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a")
    held = _seen(torch.ones(2), torch.ones(2) * 1.01)
    assert _one(draw, shown, 2) and not _one(draw, held, 2) and not _one(draw, held, 1)
    assert _one(draw, held, 3) and not _one(draw, shown, 4)
    unwritten = dataclasses.replace(draw, ops=(ops[0], ops[2], train))
    assert not _one(unwritten, shown, 1) and not _one(unwritten, held, 2)


def test_a_write_after_no_sync_is_listed_until_the_next_backward() -> None:
    unsynced = Op("backward", {"sync": False, "forwards": 1})
    train = Op("train", {"steps": 1})
    ops = (unsynced, Op("write_params"), Op("full"), train, Op("full"))
    draw = _draw(face="flat", ops=ops, strategy="SHARD_GRAD_OP", precision="none")
    shown = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a")
    assert _one(draw, shown, 2) and not _one(draw, shown, 4)
    assert not _one(dataclasses.replace(draw, strategy="FULL_SHARD"), shown, 2)


def test_gathered_parameters_are_listed_when_they_have_the_values_of_the_shards() -> None:
    draw = _draw(face="fully", ops=(Op("evaluate", {"train": False}),), precision="none")
    whole = Tensor(("Tensor", (4,), torch.float32, False), torch.arange(4.0))
    for part, meant in (([2.0, 3.0], True), ([2.0, 3.03], False), ([3.0, 2.0], False)):
        about = ("DTensor", (4,), ("S(0)",), (2,), torch.float32)
        shard = Tensor(about, torch.tensor(part), (2,))
        difference = Difference(".local.params.a[0]", "about", "", "", (whole, shard))
        assert _one(draw, difference) is meant
    other = Tensor(("DTensor", (3,), ("S(0)",), (2,), torch.float32), torch.ones(1), (2,))
    assert not _one(draw, Difference(".local.params.a[0]", "about", "", "", (whole, other)))
    for name in ("unshard", "names"):
        draw = dataclasses.replace(draw, ops=(Op(name, {}),))
        assert not _one(draw, _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a"))


def test_local_dicts_are_listed_only_for_keys_that_they_lost_or_gained() -> None:
    arguments = {"form": "LOCAL", "change": "", "strict": True, "offload": False, "rank0": False}
    draw = _draw(face="flat", orig=False, strategy="FULL_SHARD", ops=(Op("state", arguments),))
    wrong = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a[1]")
    assert not _one(draw, wrong)
    for change, meant in (("", False), ("plus", False), ("drop", True)):
        loads = dataclasses.replace(draw, ops=(Op("load", {**arguments, "change": change}),))
        assert _one(loads, _seen(["a"], ["b"], ".gave.missing")) is meant
        assert not _one(loads, _seen(torch.ones(2), torch.ones(2) * 1.01))


def test_buffers_cast_early_are_listed_when_the_cast_is_all_that_differs() -> None:
    arguments = {"form": "FULL", "offload": False, "config": False, "rank0": False}
    draw = _draw(face="flat", precision="buffers", ops=(Op("state", arguments),))
    values = torch.tensor([0.3866, 0.2409])
    low = values.bfloat16()
    assert _one(draw, _seen(low, values, ".gave.b")) and _one(draw, _seen(low.float(), values, "b"))
    assert not _one(draw, _seen(low.float() * 1.01, values, ".gave.b"))


def test_values_are_compared_bit_by_bit_until_gradients_are_added_in_another_order() -> None:
    def backward(forwards: int) -> Op:
        return Op("backward", {"sync": True, "forwards": forwards})

    first, last = Op("train", {"steps": 2}), Op("train", {"steps": 2})
    ops = (first, backward(1), backward(1), backward(2), last)
    for draw, exact in (
        (_draw(dtype="bfloat16", precision="none", strategy="FULL_SHARD", ops=ops), 3),
        (_draw(dtype="float32", precision="bf16", strategy="FULL_SHARD", ops=ops), 2),
        (_draw(dtype="float32", precision="none", strategy="NO_SHARD", ops=ops), 2),
    ):
        tolerances = [tolerance(draw, op) for op in draw.ops]
        assert tolerances[:exact] == [0.0] * exact and all(tolerances[exact:])
        assert max(tolerances) <= 0.05
