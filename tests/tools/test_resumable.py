"""What a repeated command finds at its target: its own objects, or a reason to stop."""

from __future__ import annotations

import pytest

from ckpt.errors import CheckpointError
from ckpt.saving.resumable import begin, put_once
from storage import Store, open_store


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.name}")


def test_an_object_is_put_once_and_another_one_in_its_place_is_refused(target: Store) -> None:
    put_once(target, "MANIFEST", b"ours")
    put_once(target, "MANIFEST", b"ours")
    with pytest.raises(CheckpointError, match="MANIFEST exists already and is of another"):
        put_once(target, "MANIFEST", b"theirs")
    assert target.get("MANIFEST") == b"ours"


@pytest.mark.parametrize(
    ("key", "what"), [("MANIFEST", "another checkpoint"), ("notes.txt", "other things")]
)
def test_what_is_in_the_way_is_named(target: Store, key: str, what: str) -> None:
    target.put_if_absent(key, b"")
    with pytest.raises(CheckpointError, match=f"holds {what} .such as '{key}'"):
        begin(target, others=["rank00000-000.safetensors"], last="LAST", is_ours=bool)
