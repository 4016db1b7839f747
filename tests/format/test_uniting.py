"""Values and param groups of ranks that hold different things, as one.

Method: what ranks send, by hand; the united value is compared with one written down here.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.errors import InvalidState
from ckpt.format.codec import decode_values, encode_values
from ckpt.format.joint_manifest import EncodedValues, united_values


def united(*of_ranks: dict[str, Any]) -> dict[str, Any]:
    encoded = [EncodedValues(rank, encode_values(values)) for rank, values in enumerate(of_ranks)]
    values: dict[str, Any] = decode_values(united_values(encoded))
    return values


def group(params: str, **options: Any) -> dict[str, Any]:
    return {"params": params.split(), **options}


def groups(*of_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    value: list[dict[str, Any]] = united(*({"o.param_groups": own} for own in of_ranks))[
        "o.param_groups"
    ]
    return value


def test_values_of_all_ranks_are_there_in_the_order_of_their_names() -> None:
    assert list(united({"b": 1, "d": 2}, {"c": [3]}, {"a": 4}).items()) == [
        ("a", 4),
        ("b", 1),
        ("c", [3]),
        ("d", 2),
    ]
    alone = encode_values({"b": 1, "a": 2})
    assert united_values([EncodedValues(3, alone)]) == alone  # in the order that it had
    assert decode_values(united_values([])) == {}


def test_groups_with_equal_options_are_one_as_if_the_model_had_not_been_cut() -> None:
    first = [group("a.w", decay=0.1), group("a.b", decay=0.0)]
    second = [group("b.w c.w", decay=0.1), group("b.b", decay=0.0)]
    assert groups(first, second) == [
        group("a.w b.w c.w", decay=0.1),
        group("a.b b.b", decay=0.0),
    ]
    # A stage without the first kind, and one with a parameter that the first has too.
    assert groups(first, [group("c.b a.b", decay=0.0)]) == [
        group("a.w", decay=0.1),
        group("a.b c.b", decay=0.0),
    ]


def test_groups_that_differ_and_groups_of_one_rank_stay_apart() -> None:
    assert groups([group("a", lr=1.0)], [group("b", lr=2.0)]) == [
        group("a", lr=1.0),
        group("b", lr=2.0),
    ]
    # 1 and 1.0 are equal in Python and two values in a checkpoint.
    assert len(groups([group("a", lr=1.0)], [group("b", lr=1)])) == 2
    alike = [group("a", lr=1.0), group("b", lr=1.0)]
    assert groups(alike, [group("c", lr=1.0), group("d", lr=1.0)]) == [
        group("a c", lr=1.0),
        group("b d", lr=1.0),
    ]
    assert groups([group("a", lr=1.0)], [*alike[1:], group("c", lr=1.0)]) == [
        group("a b", lr=1.0),
        group("c", lr=1.0),
    ]


def test_a_parameter_with_different_options_is_refused_with_both_ranks() -> None:
    with pytest.raises(InvalidState, match=r"the parameter a is in groups .* rank 0 and on rank 2"):
        groups([group("a", lr=1.0)], [group("b", lr=1.0)], [group("a", lr=2.0)])
