"""A root of publications, kept for ever: every later version has to follow it.

`root_v1_publication` was published once by two ranks, with `python -m
tests.golden.test_root_v1_publication DIRECTORY`: anchor, delta, delta, anchor of the same state,
delta.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import ckpt
from ckpt.commit.locate import live_entries
from ckpt.service.publisher import Due
from storage import open_store
from tests.service.test_publication import Trainer, blank, follower_of, has, whole_model

ROOT = Path(__file__).parent / "root_v1_publication"


def test_each_publication_of_the_golden_root_can_be_followed(tmp_path: Path) -> None:
    place = shutil.copytree(ROOT, tmp_path / "root")
    store = open_store(str(place))
    lines = [(entry.step, entry.line) for entry in live_entries(store)]
    assert lines == [(0, 0), (1, None), (2, None), (2, 0), (3, None)]
    state = blank(whole_model)
    follower = follower_of(state, store)
    for step in (3, 0, 1, 2, 3):
        follower.go_to(step)
        assert follower.swap() and has(state, step)
    for step in range(4):
        assert ckpt.verify(str(place), step).ok


if __name__ == "__main__":
    trainer = Trainer(open_store(sys.argv[1]), 2, Due(2, 1e9))
    for number in range(4):
        trainer.publish(number)
