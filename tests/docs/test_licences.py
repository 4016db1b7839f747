"""The licences of all packages that come with ours: a new one is looked at by a person first."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

# Of ours that users install; what only our tests need is not theirs.
EXTRAS = ("fast", "encode", "huggingface", "lightning", "data", "metrics")

PERMISSIVE = {"Apache-2.0", "BSD", "ISC", "MIT", "PSF-2.0", "CNRI", "Unlicense", "HPND"} | {
    *("Zlib", "CC0-1.0", "BSL-1.0"),
}
# Each is imported as it is, and may be replaced by its user: that is all that these ask for.
OTHERS = {"crc32c": "LGPL", "certifi": "MPL-2.0", "tqdm": "MPL-2.0"}

NAMES = (
    ("LGPL", r"LGPL|Lesser General Public"),
    ("AGPL", r"AGPL|Affero"),
    ("GPL", r"GPL|General Public License"),
    ("MPL-2.0", r"MPL|Mozilla Public"),
    ("Apache-2.0", r"Apache"),
    ("BSD", r"BSD"),
    ("MIT", r"MIT"),
    ("ISC", r"ISC"),
    ("PSF-2.0", r"PSF|Python Software Foundation"),
    ("CNRI", r"CNRI"),
    ("Unlicense", r"Unlicense"),
    ("HPND", r"HPND|CMU"),
)
_GRAMMAR = {"AND", "OR", "WITH", "LLVM-exception"}


def licences(name: str) -> set[str]:
    """What the package's metadata says, by the names above."""
    metadata = distribution(name).metadata
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License :: ") and line.count("::") > 1
    ]
    expression = metadata.get("License-Expression") or ""
    terms = [term for term in re.findall(r"[\w.+-]+", expression) if term not in _GRAMMAR]
    texts = [*terms, *classifiers]
    if not texts:
        texts = [(metadata.get("License") or "").strip().partition("\n")[0]]
    return {_known(text) for text in texts}


def _known(text: str) -> str:
    """The licence that `text` names; `text` itself where it is none of those above."""
    return next((licence for licence, pattern in NAMES if re.search(pattern, text)), text)


def installed_with_ours() -> list[str]:
    """The packages that ours brings, and those that they bring, as far as they are installed."""
    waiting = [Requirement(f"shardpoint[{','.join(EXTRAS)}]")]
    known: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        extras = requirement.extras or {""}
        for needed in map(Requirement, _requires(name)):
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                other = re.sub(r"[-_.]+", "-", needed.name).lower()
                if other not in known and _is_installed(other):
                    known.add(other)
                    waiting.append(needed)
    return sorted(known - {"shardpoint"})


def _requires(name: str) -> list[str]:
    return (distribution(name).requires or []) if _is_installed(name) else []


def _is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


@pytest.mark.parametrize("name", installed_with_ours())
def test_a_dependency_has_a_licence_that_was_looked_at(name: str) -> None:
    # Vendors' libraries that torch brings for a device are torch's choice, and its users'.
    if name.startswith(("nvidia-", "cuda-", "intel-")):
        pytest.skip("comes with torch for a device")
    allowed = {OTHERS[name]} | PERMISSIVE if name in OTHERS else PERMISSIVE
    assert licences(name) <= allowed, f"{name}: {licences(name)}; expected {sorted(allowed)}"


def test_the_exceptions_are_still_dependencies() -> None:
    if not _is_installed("shardpoint"):
        pytest.skip("ours is on the path and not installed, and brings nothing")
    assert OTHERS.keys() <= set(installed_with_ours())
    assert licences("crc32c") == {"LGPL"}
