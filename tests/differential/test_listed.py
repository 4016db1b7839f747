"""What is listed is the difference that is meant, and no wrong value beside it.

Method: differences made by hand, as the comparison would find them; each entry that could hide a
wrong value gets the one that it is for, and one with a value 1 % off, of another element, or in
another place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.differential import rows as rows_module
from tests.differential.comparing import Difference, Tensor, differences, frozen, raised
from tests.differential.draws import Draw, Op, Part, drawn
from tests.differential.listed import LISTED, listed, unplayable
from tests.differential.playing import tolerance
from tests.differential.rows import CASES, OLD, SEEDS, rows


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


def test_what_backwards_kept_is_listed_after_a_step_and_what_ends_it() -> None:
    train = Op("train", {"steps": 1})
    keep, free = (
        Op("reshards_after_backward", {"on": on, "recurse": True}) for on in (False, True)
    )
    ops = (keep, train, Op("evaluate", {"train": False}), free, Op("train", {"steps": 2}))
    draw = _draw(face="fully", ops=ops, precision="bf16", reshard=False)
    wrong = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave[0][1]")
    assert _one(draw, wrong, 4) and not _one(draw, wrong, 2)
    more = [Op("train", {"steps": steps}) for steps in (1, 2)]
    turned_back = dataclasses.replace(draw, ops=(keep, train, free, *more))
    assert _one(turned_back, wrong, 3) and not _one(turned_back, wrong, 4)
    for others in ((free, *ops[1:]), (keep, train, *more), (keep, *ops[2:])):
        assert not _one(dataclasses.replace(draw, ops=others), wrong), others
    freed = dataclasses.replace(draw, ops=(*ops[:3], Op("reshard"), ops[-1]))
    assert not _one(freed, wrong)


def test_one_element_that_was_added_up_is_listed_where_rounding_hid_it() -> None:
    backward, train = Op("backward", {"sync": True, "forwards": 1}), Op("train", {"steps": 2})
    ops = (backward, train, Op("optim_local"))
    draw = _draw(face="flat", strategy="FULL_SHARD", precision="buffers", ops=ops)
    where = ".gave.state.2.momentum_buffer"
    wrong = _seen(torch.tensor([0.0562]), torch.tensor([0.0662]), where)
    assert _one(draw, wrong)
    assert not _one(draw, _seen(torch.ones(2), torch.ones(2) * 1.01, where))
    assert not _one(draw, _seen(torch.ones(1), torch.ones(1) * 1.01, ".local.params.a[0]"))
    zero = Op("zero", {"to_none": True, "of": "model"})
    for before in ((train,), (backward, zero, train)):
        assert not _one(dataclasses.replace(draw, ops=(*before, ops[-1])), wrong)
    assert not _one(dataclasses.replace(draw, tree=(Part("linear", 3),)), wrong)


def test_a_write_after_no_sync_is_listed_until_the_next_backward() -> None:
    unsynced = Op("backward", {"sync": False, "forwards": 1})
    train = Op("train", {"steps": 1})
    ops = (unsynced, Op("write_params"), Op("full"), train, Op("full"))
    draw = _draw(face="flat", ops=ops, strategy="SHARD_GRAD_OP", precision="none")
    shown = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a")
    assert _one(draw, shown, 2) and not _one(draw, shown, 4)
    assert not _one(dataclasses.replace(draw, strategy="FULL_SHARD"), shown, 2)


def test_a_write_behind_a_frozen_unit_is_listed_where_nothing_frees_it() -> None:
    train = Op("train", {"steps": 1})
    ops = (train, Op("full"), Op("write_params"), Op("full"))
    tree = (Part("norm", 4, "all"), Part("linear", 4))
    draw = _draw(face="flat", ops=ops, strategy="SHARD_GRAD_OP", precision="none")
    trained, draw = draw, dataclasses.replace(draw, tree=tree)
    shown = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a")
    assert _one(draw, shown, 3) and not _one(draw, shown, 1), "only after the write"
    assert not _one(dataclasses.replace(draw, strategy="FULL_SHARD"), shown, 3)
    assert not _one(trained, shown, 3)


def test_gathered_parameters_are_listed_when_they_have_the_values_of_the_shards() -> None:
    ops = (Op("evaluate", {"train": False}),)
    draw = _draw(face="fully", ops=ops, precision="none", dtype="float32")
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


def test_gathered_gradients_of_this_rank_are_listed_also_along_tensor_parallelism() -> None:
    ops = (Op("backward", {"sync": False, "forwards": 1}),)
    draw = _draw(face="fully", group="tensor", ops=ops, precision="none", dtype="float32")
    where = ".local.params.a[2]"
    along = Tensor(("DTensor", (2, 4), ("S(0)",), (2,), torch.float32), torch.ones(1, 4), (0, 0))
    both = Tensor(
        ("DTensor", (2, 4), ("S(0)", "S(0)"), (2, 2), torch.float32), torch.ones(1, 4), (0, 0)
    )
    assert _one(draw, Difference(where, "kind", "", "", (along, None)))
    assert not _one(draw, Difference(where, "kind", "", "", (both, None))), "a reduced one"
    alone = dataclasses.replace(draw, group="world")
    assert not _one(alone, Difference(where, "kind", "", "", (along, None)))


def test_dicts_that_are_scattered_are_listed_for_models_side_by_side_alone() -> None:
    ops = (Op("legacy", {"kind": "scatter"}), Op("legacy", {"kind": "full"}))
    draw = _draw(face="flat", group="sub", orig=False, strategy="FULL_SHARD", ops=ops)
    wrong = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.state.0.momentum_buffer")
    assert _one(draw, wrong, 0) and not _one(draw, wrong, 1)
    assert not _one(dataclasses.replace(draw, group="world"), wrong, 0)


def test_local_dicts_are_listed_only_for_keys_that_they_lost_or_gained() -> None:
    arguments = {"form": "LOCAL", "change": "", "strict": True, "offload": False, "rank0": False}
    draw = _draw(face="flat", orig=False, strategy="FULL_SHARD", ops=(Op("state", arguments),))
    wrong = _seen(torch.ones(2), torch.ones(2) * 1.01, ".gave.a[1]")
    assert not _one(draw, wrong)
    for change, meant in (("", False), ("plus", False), ("drop", True)):
        loads = dataclasses.replace(draw, ops=(Op("load", {**arguments, "change": change}),))
        assert _one(loads, _seen(["a"], ["b"], ".gave.missing")) is meant
        assert not _one(loads, _seen(torch.ones(2), torch.ones(2) * 1.01))


def test_tensor_parallel_shards_are_listed_in_local_dicts_of_no_shard_with_equal_values() -> None:
    arguments = {"form": "LOCAL", "change": "", "strict": True, "offload": False, "rank0": False}
    draw = _draw(face="flat", strategy="NO_SHARD", group="tensor", ops=(Op("state", arguments),))
    whole = Tensor(("Tensor", (4,), torch.float32, False), torch.arange(4.0))
    about = ("DTensor", (4,), ("S(0)",), (2,), torch.float32)
    for part, offset, meant in (((2.0, 3), 2, True), ((2.0, 3), 0, False), ((2.0, 9), 2, False)):
        theirs = Tensor(about, torch.tensor(part), (offset,))
        wrong = Difference(".gave.a", "about", "", "", (theirs, whole))
        assert _one(draw, wrong) is meant
        assert not _one(dataclasses.replace(draw, strategy="FULL_SHARD"), wrong)
        assert not _one(dataclasses.replace(draw, group="world"), wrong)


def test_buffers_cast_early_are_listed_when_the_cast_is_all_that_differs() -> None:
    arguments = {"form": "FULL", "offload": False, "config": False, "rank0": False}
    draw = _draw(face="flat", precision="buffers", ops=(Op("state", arguments),), dtype="float32")
    values = torch.tensor([0.3866, 0.2409])
    low, shift = values.bfloat16(), ".gave.1.shift"
    assert _one(draw, _seen(low, values, shift)) and _one(draw, _seen(low.float(), values, shift))
    assert not _one(draw, _seen(low.float() * 1.01, values, shift))
    for wrong in (low[:1], low.double(), low.flip(0)):
        assert not _one(draw, _seen(wrong, values, shift))
    assert not _one(draw, _seen(low, values.double(), shift))
    assert not _one(draw, _seen(low, values, ".gave.0.weight")), "no buffer"
    to_double = (Op("convert", {"to": "float64"}), *draw.ops)
    converted = dataclasses.replace(draw, ops=to_double)
    assert _one(converted, _seen(low.float(), values, shift)), "as it was wrapped"
    assert not _one(converted, _seen(low.float() * 1.01, values, shift))
    assert not _one(converted, _seen(low.float(), values, ".local.buffers.1.shift"))


def test_buffers_to_which_a_dict_added_may_be_rounded_twice_and_no_more() -> None:
    arguments = {"form": "FULL", "change": "plus", "strict": True, "offload": False}
    ops = (Op("load", arguments), Op("load", arguments))
    draw = _draw(face="flat", precision="buffers", ops=ops, dtype="float32")
    start, where = torch.tensor([0.3866, 0.2409, 0.9961, 0.0]), ".local.buffers.1.shift"
    ours, theirs = start, start.bfloat16()
    for index in range(2):
        ours, theirs = ours + 1, (theirs.float() + 1).bfloat16()
        assert _one(draw, _seen(theirs, ours, where), index)
        for wrong in (theirs + 2.0**-6, theirs.float() * 1.01, theirs[:1], theirs.flip(0)):
            assert not _one(draw, _seen(wrong, ours, where), index)
        assert not _one(draw, _seen(theirs, ours * (1 + 2.0**-7), where), index)
        assert not _one(draw, _seen(theirs, ours, ".local.buffers.1.cache"), index), "in no dict"
    assert not _one(draw, _seen(theirs, ours, where), 0), "one step more than was added"


def _stepped(*after: str) -> Draw:
    ops = (Op("evaluate", {"train": False}), Op("step"), *(Op(name) for name in after))
    return _draw(face="fully", ops=ops, precision="none", dtype="float32", group="world")


SHARD = ("DTensor", (4,), ("S(0)",), (2,), torch.float32)


def _gathered(part: torch.Tensor, dtype: torch.dtype = torch.float32) -> Difference:
    whole = Tensor(("Tensor", (4,), dtype, False), torch.arange(4.0).to(dtype))
    shard = Tensor((*SHARD[:4], part.dtype), part, (2,))
    return Difference(".local.params.a[0]", "about", "", "", (whole, shard))


def test_what_is_shown_after_a_step_is_listed_until_the_shards_are() -> None:
    """The shards themselves are compared beside it, and are never listed."""
    part = torch.tensor([2.5, 3.5])
    assert _one(_stepped(), _gathered(part)) and _one(_stepped("look"), _gathered(part))
    for freed in ("reshard", "full", "zero", "clip", "write_params", "module_state", "train"):
        assert not _one(_stepped(freed), _gathered(part))
    assert not _one(_stepped(), _gathered(part), 0), "nothing was written yet"
    assert not _one(_stepped(), _gathered(part)._replace(where=".local.held[0][0]"))
    held = _seen(torch.ones(2), torch.ones(2) * 1.01, ".local.held[0][0]")
    assert not _one(_stepped(), held) and not _one(_stepped("look"), held)
    for wrong in (_gathered(part.double()), _gathered(part, torch.bfloat16)):
        assert not _one(_stepped(), wrong), "another dtype"
    low = dataclasses.replace(_stepped(), precision="bf16")
    assert _one(low, _gathered(part, torch.bfloat16))


def test_a_shard_over_fewer_ranks_begins_where_torch_cuts_the_padded_parameter() -> None:
    about = ("DTensor", (5,), ("R", "S(0)"), (2, 2), torch.float32)
    theirs = Tensor(about, torch.tensor([4.0, 9.0, 9.0, 9.0]), (3,))  # it says that it begins at 3
    draw = dataclasses.replace(_stepped(), ops=(Op("look"),), world=4, reshard=2)

    def differing(value: float, offset: int, **changes: object) -> bool:
        about = ("DTensor", (5,), ("S(0)",), (4,), torch.float32)
        ours = Tensor(about, torch.tensor([value]), (offset,))
        difference = Difference(".local.params.a[0]", "about", "", "", (theirs, ours))
        return _one(dataclasses.replace(draw, **changes), difference)  # type: ignore[arg-type]

    assert differing(4.0, 4)
    assert not differing(4.04, 4) and not differing(9.0, 4)
    assert not differing(4.0, 4, reshard=True) and not differing(4.0, 4, group="mesh2")


def test_tensor_parallel_members_are_listed_as_the_same_local_tensor() -> None:
    draw = _draw(face="flat", group="tensor", strategy="NO_SHARD", orig=True, ops=(Op("full"),))
    values = torch.tensor([2.0, 3.0])
    theirs = Tensor(("DTensor", (4,), ("S(0)",), (2,), torch.float32), values, (2,))

    def differing(ours: torch.Tensor, **changes: object) -> bool:
        held = Tensor(("Tensor", tuple(ours.shape), ours.dtype, False), ours)
        difference = Difference(".gave.a", "about", "", "", (theirs, held))
        return _one(dataclasses.replace(draw, **changes), difference)  # type: ignore[arg-type]

    assert differing(values)
    for wrong in (values * 1.01, values.flip(0), values.double(), values[:1], torch.arange(4.0)):
        assert not differing(wrong)
    state = Op("state", {"form": "FULL", "rank0": False, "offload": False, "config": True})
    whole = torch.tensor([0.5, 0.5, 2.0, 3.0])  # the rows of the other rank are wrong
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        assert not differing(whole, ops=(state,), strategy=strategy)


def test_what_torch_raises_is_listed_where_our_side_raises_nothing() -> None:
    text = "Invalid usage of tensors with different dtypes"
    ops = (Op("convert", {"to": "float64"}), Op("train", {"steps": 1}))
    draw = _draw(face="flat", ops=ops, dtype="float32")
    refused = raised(RuntimeError(text))

    def differing(draw: Draw, ours: object, index: int = 1) -> bool:
        (difference,) = differences(refused, ours, 0.0)
        return _one(draw, difference, index)

    assert differing(draw, None)
    assert not differing(draw, raised(KeyError("another"))), "ours failed too"
    assert not differing(draw, None, 0), "not converted yet"
    assert not differing(dataclasses.replace(draw, dtype="float64"), None), "to what it was"
    assert not _one(draw, _seen(torch.ones(1), torch.ones(1) * 1.01, ".gave[0][1]"), 1)


def test_gradients_are_summoned_on_both_sides_unless_a_rank_may_have_none() -> None:
    backward = Op("backward", {"sync": True, "forwards": 1})
    summon = Op("summon", {"with_grads": True, "offload_to_cpu": False, "writeback": False})
    zero = Op("zero", {"to_none": True, "of": "model"})
    linear, scaled = Part("linear", 3), Part("scaled", 1)

    def skipped(*before: Op, tree: object = (linear, scaled), **changes: object) -> bool:
        given = {"orig": True, "strategy": "FULL_SHARD", "dtype": "bfloat16", **changes}
        draw = dataclasses.replace(
            _draw(face="flat", group="world", extra="", precision="none", ops=(*before, summon)),
            tree=tree, **given,
        )  # type: ignore[arg-type]  # fmt: skip
        return unplayable(draw, draw.ops[-1]) is not None

    assert skipped(backward) and skipped(backward, tree=(Part("linear", 3, "first"), linear))
    assert not skipped() and not skipped(backward, Op("train", {"steps": 1}))
    assert not skipped(backward, zero) and not skipped(backward, tree=(linear, Part("tied", 1)))
    assert not skipped(backward, dtype="float32") and not skipped(backward, strategy="NO_SHARD")
    to_double = Op("convert", {"to": "float64"})
    assert skipped(to_double, backward, dtype="float32")


def test_each_row_of_the_page_has_a_draw_or_a_case() -> None:
    assert set(SEEDS) <= {entry.page for entry in LISTED}
    for row in rows():
        assert sum(row.startswith(one) for one in (*SEEDS, *CASES, OLD)) == 1, row


def test_a_case_that_does_not_show_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch does as ours does, or ours as torch's."""
    ranks: dict[str, list[Any]] = {"torch": ["RuntimeError"] * 2, "ours": [None] * 2}
    monkeypatch.setattr(rows_module, "_on_ranks", lambda case, name: ranks[name])
    case = "two backwards over one retained graph"
    assert rows_module._side_by_side(case) == "side by side"
    for wrong in ({"torch": [None] * 2}, {"ours": ["RuntimeError"] * 2}):
        monkeypatch.setitem(ranks, *wrong.popitem())
        assert rows_module._side_by_side(case).startswith("not seen: ours")


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
