"""`tests/rehearse/training.py` for ckpt-chaos: it saves every 5 steps, ends after 12, and writes
down what it has then.

python -m tests.judges.chaotic FOLDER [what it forgets ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ckpt
from ckpt.rehearse.seen import TRAINED, seen
from tests.rehearse import training

LAST = 12


def main(folder: str, forgotten: set[str]) -> None:
    """Train, from the newest checkpoint in `folder`."""
    every, step = ckpt.EverySteps, ckpt.Checkpointer.step

    def counted(one: Any, number: int) -> None:
        step(one, number)
        if number == LAST:
            values = seen([one._training.state], sys._getframe(1))
            kept = {name: value.text for name, value in values.items() if value.kind in TRAINED}
            # Before the save of this step: killed behind that, there is nothing left to train.
            (Path(folder) / "final").write_text(json.dumps(kept, sort_keys=True))
        if number >= LAST:
            one.close()
            sys.exit(0)

    vars(ckpt)["EverySteps"] = lambda _: every(5)
    training.ckpt.Checkpointer.step = counted  # type: ignore[assignment, method-assign]
    Path(folder).mkdir(exist_ok=True)
    training.main(f"{folder}/run", forgotten)


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
