"""Near tiers on the pages of `serve` and `report`: the work at risk, and a table of directories.

Pure. Every text that comes from storage is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckpt.cli.near_rows import TITLES, problems, risks_text, tier_row
from ckpt.cli.visible import page_text
from ckpt.tools.near_tiers import TierView, newest_status_of
from ckpt.tools.run import ReportedSave

_NUMBERS = ("newest step", "ranks here", "takes", "free")


def near_of(
    views: Sequence[TierView], newest: ReportedSave | None, when: Callable[[float], str]
) -> Iterator[str]:
    """What a failure would cost now, and what each directory has; `newest` is the newest durable
    checkpoint. `when` writes a moment.
    """
    status = newest_status_of(views)
    if status is None:
        yield '<p class="note">No host says how far the training is.</p>\n'
    else:
        yield f"<p>step {status.step} done, noted {when(status.time_unix)}</p>\n"
        if risks := risks_text(views, newest):
            yield f"<p><b>{page_text(risks)}</b></p>\n"
    kinds = ["number" if title in _NUMBERS else "" for title in TITLES]
    heads = zip(kinds, TITLES, strict=True)
    yield '<div class="scroll" tabindex="0" role="region" aria-label="near directories"><table><tr>'
    yield "".join(f'<th class="{kind}">{title}</th>' for kind, title in heads) + "</tr>\n"
    for view in views:
        cells = zip(kinds, tier_row(view), strict=True)
        row = "".join(f'<td class="{kind}">{page_text(text)}</td>' for kind, text in cells)
        yield f"<tr>{row}</tr>\n"
    yield "</table></div>\n"
    for problem in problems(views):
        yield f'<div class="notice warning"><b>warning</b>{page_text(problem)}</div>\n'
