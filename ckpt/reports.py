"""What functions of `ckpt` return, for annotations."""

from __future__ import annotations

from ckpt.convert.export import ExportReport
from ckpt.convert.import_ import ImportReport
from ckpt.loading.contents import StepInfo
from ckpt.loading.load import LoadReport
from ckpt.rehearse.runs import RehearsalReport
from ckpt.saving.background import PendingSave
from ckpt.saving.shared import SharedSave
from ckpt.saving.task import SaveReport
from ckpt.service.follower import Follower, Swapped, Update
from ckpt.service.inflight import Saved
from ckpt.service.removing import PinReport, PruneReport, Removal
from ckpt.service.restore import RestoreReport
from ckpt.tools.cost import CostReport
from ckpt.tools.diff import DiffReport
from ckpt.tools.mend import MendReport
from ckpt.tools.near_tiers import NearListing
from ckpt.tools.overview import DiskUsage, Event, LogReport, RootListing
from ckpt.tools.plan import LoadPlan
from ckpt.tools.relay import CopyReport
from ckpt.tools.report import Report
from ckpt.tools.rescue import RescueReport
from ckpt.tools.salvage import Salvaged
from ckpt.tools.verify import VerifyReport

__all__ = [
    "CopyReport",
    "CostReport",
    "DiffReport",
    "DiskUsage",
    "Event",
    "ExportReport",
    "Follower",
    "ImportReport",
    "LoadPlan",
    "LoadReport",
    "LogReport",
    "MendReport",
    "NearListing",
    "PendingSave",
    "PinReport",
    "PruneReport",
    "RehearsalReport",
    "Removal",
    "Report",
    "RescueReport",
    "RestoreReport",
    "RootListing",
    "Salvaged",
    "SaveReport",
    "Saved",
    "SharedSave",
    "StepInfo",
    "Swapped",
    "Update",
    "VerifyReport",
]
