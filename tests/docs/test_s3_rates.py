"""The request rates that docs/howto/s3.md gives for 16,384 ranks follow from the code's own sizes.

Method: the table is read from the page and computed anew from the parts and ranges that saves and
loads use behind a network, and from S3's published limits for a prefix.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.api import read_path, write_path
from ckpt.saving.image import Staging
from storage.memory import MemoryStore
from storage.ranges import part_count

MIB = 1 << 20
RANKS = 16_384
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
WRITES_PER_SECOND, READS_PER_SECOND = 3_500, 5_500
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "s3.md"


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def row_of(nbytes: int) -> list[str]:
    """What the table says of ranks that have `nbytes` each."""
    store = MemoryStore()
    store.part_nbytes_min = 5 * MIB
    parts = part_count(nbytes, write_path("auto", store, Staging()).part_nbytes)
    save = RANKS * (parts + 2 if parts > 1 else 1)  # an upload has a beginning and an end
    load = RANKS * part_count(nbytes, read_path(store).request_nbytes_max)
    return [
        cell
        for requests, rate in ((save, WRITES_PER_SECOND), (load, READS_PER_SECOND))
        for cell in (f"{requests:,}", seconds(requests / rate), seconds(requests / rate / 16))
    ]


def test_the_table_of_request_rates_is_what_the_code_sends() -> None:
    text = PAGE.read_text()
    assert f"So {RANKS:,} ranks take at least" in text
    assert f"{WRITES_PER_SECOND:,} writes and {READS_PER_SECOND:,} reads" in text
    rows = re.findall(r"^\| (?:up to )?(\d+) MiB[^|]*\|(.+)\|$", text, re.MULTILINE)
    assert len(rows) == 3
    for mib, cells in rows:
        assert [cell.strip() for cell in cells.split("|")] == row_of(int(mib) * MIB)
