"""From a root and a step to a manifest: which one is taken, and that no other bytes pass for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.commit.locate import file_key, locate
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME
from ckpt.errors import Corrupt, NoCheckpoint
from storage.local import LocalStore
from storage.wrap import WrappedStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        ckpt.save({"x": torch.ones(3) * step}, str(tmp_path / "run"), step=step)
    return tmp_path / "run"


def manifest_of(root: Path, step: int) -> Path:
    return next((root / "steps").glob(f"{step:08d}-*")) / MANIFEST_NAME


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data + b"\0", "was changed"),
        (lambda data: data[:-1], "bytes were committed|were committed"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the digest of its"),
    ],
    ids=["longer", "shorter", "other"],
)
def test_a_manifest_that_is_not_the_committed_one_is_refused(
    root: Path, change: object, problem: str
) -> None:
    path = manifest_of(root, 2)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(Corrupt, match=f"{MANIFEST_NAME}.*({problem}).*ckpt salvage --step 2"):
        locate(LocalStore(str(root)))
    assert locate(LocalStore(str(root)), 1).entry is not None


def test_a_manifest_that_is_gone_is_no_step_that_never_was(root: Path) -> None:
    manifest_of(root, 2).unlink()
    with pytest.raises(Corrupt, match="is missing, although step 2 is committed"):
        locate(LocalStore(str(root)))
    with pytest.raises(NoCheckpoint, match="has no step 3; it has 2 steps: 1, 2"):
        locate(LocalStore(str(root)), 3)
    with pytest.raises(NoCheckpoint, match="no live checkpoint e000001-0: it was retired"):
        locate(LocalStore(str(root)), attempt="e000001-0")


def test_a_checkpoint_that_is_retired_between_two_looks_is_not_damaged(root: Path) -> None:
    class Late(WrappedStore):
        """The step is retired just before its manifest is read."""

        def get_bounded(self, key: str, nbytes_max: int) -> bytes:
            if key.endswith(MANIFEST_NAME) and "00000002-" in key:
                maintenance = Maintenance.open(LocalStore(str(root)))
                maintenance.retire(key.split("/")[1].removeprefix("00000002-"))
            return super().get_bounded(key, nbytes_max)

    with pytest.raises(NoCheckpoint, match="has no step 2; it has 1 step: 1"):
        locate(Late(LocalStore(str(root))), 2)


def test_keys_of_files_are_in_the_step_or_in_the_one_that_they_name() -> None:
    assert file_key("steps/a/", "x.safetensors") == "steps/a/x.safetensors"
    assert file_key("", "x.safetensors") == "x.safetensors"
    assert file_key("steps/a/", "../b/x.safetensors") == "steps/b/x.safetensors"
    assert file_key("a/", "../b/x.safetensors") == "b/x.safetensors"
    with pytest.raises(NoCheckpoint, match="open the checkpoint's root"):
        file_key("", "../b/x.safetensors")
