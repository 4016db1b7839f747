"""Every wait, record and event of the stream seam is needed, and the detector knows why.

Method: one call of the seam is left out at a time, inside the seam and where the engine calls it.
Some scenario must then have a race, take more memory from the device or keep more. The calls are
found in the source, so a new one is a new mutant; which scenarios are tried first is listed here.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest

from tests.conftest import Scale
from tests.ranks import run_ranks
from tests.streams.mutants import SEAM, USERS, Mutant, applied, mutants
from tests.streams.running import Report, run_one

Try = tuple[str, str]
"""A surface and a scenario."""

AHEAD = ("flat", "more_units_than_may_be_gathered_ahead")
OFFLOAD = ("flat", "offload_with_accumulation")
OVER_AN_AXIS = ("fully", "low_precision_and_accumulation_over_an_axis")
SMALLER = ("fully", "smaller_shards_of_a_module_called_twice")
STEP_ALONE = ("fully", "gathers_wait_for_the_step_alone")
FORWARD_ASIDE = ("fully", "a_forward_on_a_side_stream")
EARLY = ("flat", "prefetch_of_every_kind")
HOOK_ASIDE = ("fully", "a_hook_on_a_stream_of_the_user")
SHARED = ("fully", "streams_shared_while_they_have_work_of_one_rank")
TWO_STREAMS = ("fully", "gathered_on_one_stream_and_used_on_another")
# Few, and between them every call matters in one.
TRIES: tuple[Try, ...] = (
    ("fully", "a_group_of_its_own_for_reductions"),
    ("flat", "plain"),
    OVER_AN_AXIS,
    OFFLOAD,
    AHEAD,
    SMALLER,
    STEP_ALONE,
    FORWARD_ASIDE,
    TWO_STREAMS,
    EARLY,
    ("fully", "offload_over_an_axis"),
    ("fully", "offload_over_an_axis_and_hooks"),
    ("flat", "a_unit_alone"),
    ("flat", "offload_and_evaluation"),
    ("fully", "unshard_early_on_one_rank"),
    ("fully", "unshard_and_reshard_without_use"),
    ("fully", "sums_reduced_by_a_backward_that_misses_the_unit"),
    ("fully", "values_written_between_forward_and_backward"),
    ("fully", "a_unit_alone"),
    ("fully", "what_an_extension_makes"),
    ("orig", "values_put_in_place_of_parameters"),
    ("fully", "a_backward_that_raises"),
    HOOK_ASIDE,
    ("fully", "a_hook_on_a_stream_of_the_user_with_offload"),
    SHARED,
    ("fully", "gathered_memory_kept"),
    ("fully", "backwards_ended_by_hand"),
)
# By what is left out, or the function that it is left out of: where to look first.
FIRST: dict[str, Try] = {
    "wait_stream(stream)": HOOK_ASIDE,
    "stream.synchronize()": ("fully", "offload_over_an_axis_and_hooks"),
    "self._gather.synchronize()": ("flat", "offload_and_evaluation"),
    "finish: self.": OFFLOAD,
    "_repeat": OVER_AN_AXIS,
    "_post_step": STEP_ALONE,
    "mark": SMALLER,
    "compute_waits_for_reductions": FORWARD_ASIDE,
    "record_stream": TWO_STREAMS,
    "will_free": TWO_STREAMS,
    "_end_backward: self.streams.release_all": ("flat", "plain"),
    "end_forward_alone: self.streams.release_all": ("flat", "a_unit_alone"),
    "start_unshard: self.streams.release_all": AHEAD,
    "take_back": EARLY,
    "give_back": AHEAD,
    "_free": EARLY,
    "compute_waits_for_gathers": ("fully", "unshard_early_on_one_rank"),
    "begin_alone": ("fully", "a_unit_alone"),
    "begin_backward": ("fully", "values_written_between_forward_and_backward"),
    "end_forward_alone": ("flat", "offload_and_evaluation"),
    "_end_backward": OFFLOAD,
    "reshard": ("fully", "unshard_and_reshard_without_use"),
    "_drop_repeated": OVER_AN_AXIS,
    "Reductions.drop": ("fully", "a_backward_that_raises"),
    "reduce_kept": ("fully", "sums_reduced_by_a_backward_that_misses_the_unit"),
    "start_early": ("fully", "unshard_early_on_one_rank"),
    "adopt_values": ("orig", "values_put_in_place_of_parameters"),
    "DTensorStore.release": TWO_STREAMS,
    "set_post_optim_event": STEP_ALONE,
    "follow": SHARED,
    "_kept_mark": ("fully", "gathered_memory_kept"),
    "by_hand": ("fully", "backwards_ended_by_hand"),
}


@functools.cache
def unmutated(surface: str, scenario: str) -> Report:
    report = run_one("ours", surface, scenario)
    assert not report.findings and not report.error, (report, report.findings, report.error)
    return report


def tries_for(mutant: Mutant) -> list[Try]:
    first = [one for text, one in FIRST.items() if text in str(mutant)]
    return list(dict.fromkeys([*first, *TRIES]))


def found_by(mutant: Mutant) -> str:
    """What shows that the engine is not as it should be; empty when nothing does."""
    for surface, scenario in tries_for(mutant):
        with applied(mutant):
            report = run_one("ours", surface, scenario)
        if report.findings or report.error:
            return f"{report}: {(report.findings or (report.error,))[0]}"
        for what in ("reserved", "live at the end"):
            more = report.counts[what] - unmutated(surface, scenario).counts[what]
            if more > 0:
                return f"{report}: {more} bytes more {what}"
    return ""


def hunt(chosen: Sequence[Mutant]) -> list[str]:
    return [found_by(mutant) for mutant in chosen]


@pytest.mark.ranks
@pytest.mark.timeout(3600)
def test_every_call_of_the_seam_that_is_left_out_is_found(scale: Scale, rng: random.Random) -> None:
    everything = mutants(SEAM, *USERS)
    assert len(everything) >= 30
    count = scale.count(8, len(everything))
    chosen = rng.sample(everything, count)
    (hits,) = run_ranks(1, hunt, chosen, group=False, timeout_seconds=3000)
    missed = [str(mutant) for mutant, how in zip(chosen, hits, strict=True) if not how]
    assert not missed, missed
