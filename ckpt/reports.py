"""What functions of `ckpt` return, for annotations."""

from __future__ import annotations

from ckpt.convert.export import ExportReport
from ckpt.convert.import_ import ImportReport
from ckpt.loading.contents import StepInfo
from ckpt.loading.load import LoadReport
from ckpt.saving.background import PendingSave
from ckpt.saving.task import SaveReport
from ckpt.service.follower import Follower, Swapped, Update
from ckpt.service.inflight import Saved
from ckpt.service.restore import RestoreReport
from ckpt.tools.copy import CopyReport
from ckpt.tools.diff import DiffReport
from ckpt.tools.overview import DiskUsage, Event
from ckpt.tools.plan import LoadPlan
from ckpt.tools.verify import VerifyReport

__all__ = [
    "CopyReport",
    "DiffReport",
    "DiskUsage",
    "Event",
    "ExportReport",
    "Follower",
    "ImportReport",
    "LoadPlan",
    "LoadReport",
    "PendingSave",
    "RestoreReport",
    "SaveReport",
    "Saved",
    "StepInfo",
    "Swapped",
    "Update",
    "VerifyReport",
]
