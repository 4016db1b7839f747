"""What a salvage says, compared with the MANIFEST that is there."""

from __future__ import annotations

import contextlib

from ckpt.commit.names import MANIFEST_NAME
from ckpt.tools.salvage import SalvageReport
from storage import CorruptObjectError, KeyNotFoundError, Store
from tests.format.encoding import encode_manifest


def matches_manifest(store: Store, report: SalvageReport) -> bool | None:
    """Whether the MANIFEST that is there equals the rebuilt one; None when there is none."""
    with contextlib.suppress(KeyNotFoundError):
        try:
            there = store.get(f"{report.prefix}/{MANIFEST_NAME}")
        except CorruptObjectError:
            return False
        return report.manifest is not None and there == encode_manifest(report.manifest)
    return None
