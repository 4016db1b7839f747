"""Writes docs/troubleshooting.md from the error classes.

    python docs/troubles.py            tests/docs/test_words.py compares

A section has the class's docstring as the cause, and from here the next move and the text to search
for; "..." in a text stands for values. A class without an entry, and a text that the code no longer
has, fail a test.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import ckpt.errors
import storage.errors
from storage.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"


class Trouble(NamedTuple):
    """`text` is part of a message as the code has it."""

    text: str
    move: str


TROUBLES = {
    "CheckpointError": Trouble(
        "failed in phase",
        "Catch this class for every failure of the library, stores included.",
    ),
    "InvalidState": Trouble(
        "the ranks have different values of it",
        "Declare what differs between ranks with `ckpt.PerRank`, make it equal, or take it out "
        "([what a state may hold](states.md)).",
    ),
    "Mismatch": Trouble(
        "does not fit the state",
        "Compare with `ckpt show URL`. Pass `rename=` for other names, `skip=` for entries to "
        "leave as they are, `new=` for what the checkpoint cannot have, `resize=` for other "
        "numbers of rows (a larger vocabulary), `strict=False` for a part.",
    ),
    "InvalidArgument": Trouble(
        "leave out step= and attempt=",
        "Correct the argument that the message names; nothing was read or written.",
    ),
    "NoCheckpoint": Trouble(
        "has no checkpoint yet",
        "Check the url and `ckpt ls URL`. `restore()` of a first job returns None instead. If "
        "saves were made there, run `ckpt mend URL --dry-run`.",
    ),
    "Corrupt": Trouble(
        "does not match its checksum",
        "Load an older step with `step=`, as `Checkpointer.restore()` does by itself. `ckpt verify "
        "URL` shows what is damaged, `ckpt salvage` rebuilds a lost manifest.",
    ),
    "UnsupportedFormat": Trouble(
        "upgrade shardpoint",
        "Upgrade this installation, or read with the one that wrote. Roots that were written "
        "before 0.2 cannot be read.",
    ),
    "StoreRefused": Trouble(
        "ranks look at different",
        "Give all ranks the same url and a store that all of them see. A filesystem that cannot "
        "create exclusively needs `unsafe_single_writer=True` and one writer.",
    ),
    "LogDiverged": Trouble(
        "it was removed meanwhile",
        "Find out who moved, copied, restored or removed the root (`ckpt log URL`; `ckpt mend URL` "
        "repairs it). Then call `ckpt.forget(url)` on all ranks, or save to another url.",
    ),
    "Fenced": Trouble(
        "was claimed by a newer session",
        "Let this job end, or stop the other and restart this one.",
    ),
    "OutcomeUnknown": Trouble(
        "Nothing of it was deleted; the next save settles it",
        "Save again, or restore: both say whether the checkpoint exists.",
    ),
    "Forked": Trouble(
        "belongs to process",
        "Save in the process that began it, or make a Checkpointer of your own in the child. "
        "Readers work in children.",
    ),
    "SaveDropped": Trouble(
        "another one is in flight",
        "Save less often, or pass `when_busy=\"wait\"`. The checkpoints before are untouched.",
    ),
    "NamesChanged": Trouble(
        "this rank holds things of other names",
        "Nothing: a save begins again by itself. If you see it, report it.",
    ),
    "RankFailed": Trouble(
        "did not answer within",
        "Read the log of the named rank. If it hangs, look whether only some ranks make the call, "
        "as under `if rank == 0:`. [Continue without it](howto/lost_rank.md).",
    ),
    "RankFailedInCommit": Trouble(
        "a rank was lost before this rank has learned whether it is committed",
        "Restart or `rejoin`: the restore finds the checkpoint if it was committed.",
    ),
    "LoadInterrupted": Trouble(
        "failed after it had begun to write into the state",
        "Load again, this or another step, before you use the state.",
    ),
    "SavesFailed": Trouble(
        "saves in a row have failed",
        "Mend the store by the newest error in the list. No acknowledged checkpoint is lost.",
    ),
    "StorageError": Trouble(
        "give this user the right to, or use another place",
        "The message names operation, key and url.",
    ),
    "KeyNotFoundError": Trouble(
        "there is no such upload",
        "Check the url. In a root: a step was retired while it was read (load another), or files "
        "were removed by hand (`ckpt verify URL`).",
    ),
    "KeyExistsError": Trouble(
        "exists already",
        "Choose another target: nothing is overwritten.",
    ),
    "ShortReadError": Trouble(
        "bytes ... to ... were requested",
        "The object was cut, or the server answers with less: run `ckpt verify URL`.",
    ),
    "CorruptObjectError": Trouble(
        "is not encoded, although its root is",
        "Load an older step, or restore the object from a copy. Check that the key is this root's.",
    ),
    "TooLargeError": Trouble(
        "were expected",
        "The object is not what its name says; run `ckpt verify URL`.",
    ),
    "AccessDeniedError": Trouble(
        "give this user the right to, or use another place",
        "Give the user or role the right that the message names "
        "([policies](howto/s3_operator.md)); check credentials and region.",
    ),
    "NoSpaceError": Trouble(
        "free space or use another place",
        "Run `ckpt prune URL` with a rule: it works on a full disk. Then save again.",
    ),
    "InvalidUrlError": Trouble(
        "is built in; choose another scheme",
        "Check protocol and bucket; `s3://`, `gs://` and `az://` need their extras. A bucket is "
        "`s3://bucket/prefix`, not its https address.",
    ),
    "InvalidKeyError": Trouble(
        "is not a key",
        "Use relative names without empty, `.` or `..` parts.",
    ),
    "TransientError": Trouble(
        "the answer ended early",
        "It is repeated for 2 minutes, in the background for 10. If it stays, look at network and "
        "server.",
    ),
    "SlowDownError": Trouble(
        "uploads are under way here",
        "Save less often, or spread keys with the option `spread` ([S3](howto/s3.md)).",
    ),
    "OutcomeUnknownError": Trouble(
        "the object may exist",
        "Repeat the call: what was written is found.",
    ),
}  # fmt: skip
HEAD = """# Troubleshooting

Search this page for the error's name, or for words of its text. Each section has the cause, `part
of a text`, and the next move. Errors are in `ckpt.errors`, those of stores in `storage`.
`python docs/troubles.py` writes the page from the classes.

```python
import ckpt

try:
    ckpt.load({"model": model}, "runs/nothing_here")
except ckpt.errors.NoCheckpoint as error:
    print(error)  # what, where, and the next move
```

First look, from a shell:

```sh
ckpt ls runs/7b
ckpt log runs/7b
ckpt verify runs/7b
```

| you see | it is |
| --- | --- |
| `restore()` returns None after saves | another url, or a lost log: `ckpt mend URL --dry-run` |
| a save hangs | not all ranks make the call; after 15 s the log names those that do not |
| a restore took an older step | the newest was damaged: `report.skipped` says why |
| steps are slower during saves | [observe](howto/observe.md) what a save does; `io=` |
| S3 is slow or refuses | [My S3 is slow](howto/s3.md) |
| the disk fills | a retention rule is missing: `keep=ckpt.KeepLatest(3)` |
"""


def classes() -> list[type[CheckpointError]]:
    """All error classes of the two modules, in the order in which they stand there."""
    outcomes: list[type[CheckpointError]] = []
    for module in (ckpt.errors, storage.errors):
        for each in vars(module).values():
            is_error = inspect.isclass(each) and issubclass(each, CheckpointError)
            if is_error and each not in outcomes:
                outcomes.append(each)
    return outcomes


def page() -> str:
    """The page as text. Raises KeyError for a class without an entry."""
    return HEAD + "".join(_section(each) for each in classes())


def _section(error: type[CheckpointError]) -> str:
    trouble = TROUBLES[error.__name__]
    cause = " ".join((error.__doc__ or "").split())
    return f"\n## {error.__name__}\n\n{cause}\n\n`{trouble.text}`: {trouble.move}\n"


def texts_of_the_code() -> str:
    """All sources in one line, literals joined, values as "..."."""
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("ckpt", "storage")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    return re.sub(r"\{[^{}]*\}", "...", joined)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
