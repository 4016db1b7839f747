"""Play draws by hand: `python -m tests.differential SEED --ranks 2` replays one, call by call."""

from __future__ import annotations

import argparse
import collections
import sys
import time

from tests.differential.draws import drawn
from tests.differential.playing import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("seed", type=int, help="the draw, or the first one")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--count", type=int, default=1, help="play so many draws from SEED on")
    given = parser.parse_args()
    if given.count == 1:
        print(drawn(given.seed, given.ranks), flush=True)
    began = time.monotonic()
    seeds = range(given.seed, given.seed + given.count)
    outcomes = play(given.ranks, seeds, verbose=given.count == 1)
    wrong = [outcome for outcome in outcomes if outcome.differences]
    known: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        known.update(outcome.known)
    for outcome in wrong:
        print(outcome)
    for name, count in sorted(known.items()):
        print(f"listed, {count} times: {name}")
    calls = sum(outcome.calls for outcome in outcomes)
    print(
        f"{len(outcomes)} draws, {calls} calls, {time.monotonic() - began:.0f} s, "
        f"{len(wrong)} draws with differences"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
