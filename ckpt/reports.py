"""What functions of `ckpt` return, for annotations."""

from __future__ import annotations

from ckpt.convert.export import ExportReport as ExportReport
from ckpt.convert.import_ import ImportReport as ImportReport
from ckpt.loading.contents import StepInfo as StepInfo
from ckpt.loading.load import LoadReport as LoadReport
from ckpt.rehearse.runs import RehearsalReport as RehearsalReport
from ckpt.saving.background import PendingSave as PendingSave
from ckpt.saving.shared import SharedSave as SharedSave
from ckpt.saving.task import SaveReport as SaveReport
from ckpt.service.follower import Changed as Changed
from ckpt.service.follower import Follower as Follower
from ckpt.service.follower import Swapped as Swapped
from ckpt.service.follower import Update as Update
from ckpt.service.inflight import Saved as Saved
from ckpt.service.removing import PinReport as PinReport
from ckpt.service.removing import PruneReport as PruneReport
from ckpt.service.removing import Removal as Removal
from ckpt.service.restore import RestoreReport as RestoreReport
from ckpt.tools.cost import CostReport as CostReport
from ckpt.tools.diff import DiffReport as DiffReport
from ckpt.tools.mend import MendReport as MendReport
from ckpt.tools.near_tiers import NearListing as NearListing
from ckpt.tools.overview import DiskUsage as DiskUsage
from ckpt.tools.overview import Event as Event
from ckpt.tools.overview import LogReport as LogReport
from ckpt.tools.overview import RootListing as RootListing
from ckpt.tools.plan import LoadPlan as LoadPlan
from ckpt.tools.relay import CopyReport as CopyReport
from ckpt.tools.report import Report as Report
from ckpt.tools.rescue import RescueReport as RescueReport
from ckpt.tools.salvage import Salvaged as Salvaged
from ckpt.tools.verify import VerifyReport as VerifyReport
