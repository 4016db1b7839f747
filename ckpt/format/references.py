"""Names of data files in directories of other attempts, whose bytes a checkpoint shares.

FORMAT.md, "References", is the specification.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REFERENCES = "references"  # the feature in `Header.required`
PARENT = "../"
DATA_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors"

_PLAIN = re.compile(DATA_FILE, re.ASCII)
_REFERENCE = re.compile(
    r"\.\./(?P<directory>(?P<step>[0-9]{8,18})-(?P<attempt>e(?P<epoch>[0-9]{6,18})-[0-9a-f]{16}))/"
    rf"(?P<name>{DATA_FILE})",
    re.ASCII,
)


class Reference(NamedTuple):
    """A data file of another attempt of the same root."""

    directory: str  # below steps/, without slashes
    attempt: str
    name: str


def is_reference(file: str) -> bool:
    """Whether a file of a manifest lies in another attempt's directory."""
    return file.startswith(PARENT)


def is_data_file_name(file: str) -> bool:
    """Whether `file` is the name of a data file in the checkpoint's own directory."""
    return _PLAIN.fullmatch(file) is not None


def reference_to(step: int, attempt: str, name: str) -> str:
    """How a manifest names the data file `name` of another attempt."""
    return f"{PARENT}{step:08d}-{attempt}/{name}"


def parse_reference(file: str) -> Reference | None:
    """The inverse of `reference_to`; None for everything that it does not make, to the letter."""
    match = _REFERENCE.fullmatch(file)
    if match is None:
        return None
    step, epoch = match["step"], match["epoch"]
    if f"{int(step):08d}" != step or f"{int(epoch):06d}" != epoch or int(epoch) < 1:
        return None
    return Reference(match["directory"], match["attempt"], match["name"])
