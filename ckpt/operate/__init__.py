"""What operators do to checkpoints: the functions behind the commands of `ckpt`.

Each has the name and the arguments of its command, and returns what `--json` prints; the names of
`ckpt` itself are among them. No function needs a process group, and importing this module imports
neither torch nor numpy.
"""

from ckpt.operate.comparing import diff, plan_ranks
from ckpt.operate.keeping import mend, pin, prune, rescue, rm, salvage, unpin, verify
from ckpt.operate.looking import cost, disk_usage, log, ls, report
from ckpt.operate.moving import copy, export, import_checkpoint, reshard
from ckpt.operate.rehearsing import rehearse

__all__ = [
    "copy",
    "cost",
    "diff",
    "disk_usage",
    "export",
    "import_checkpoint",
    "log",
    "ls",
    "mend",
    "pin",
    "plan_ranks",
    "prune",
    "rehearse",
    "report",
    "rescue",
    "reshard",
    "rm",
    "salvage",
    "unpin",
    "verify",
]
