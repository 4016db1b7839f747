"""Wrong input through the public functions, on local disk: a clear error, and nothing half done.

Method: a small model and optimizer are saved by one process. Then something is made wrong: the url,
a stored object, the state, the disk. The error must name what, where and the next move; the state
must have its old bits, and the root must still load and save when the fault is gone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import (
    CheckpointError,
    Corrupt,
    InvalidArgument,
    InvalidState,
    LoadInterrupted,
    Mismatch,
    NoCheckpoint,
    StoreRefused,
    UnsupportedFormat,
)
from storage import InvalidUrlError, NoSpaceError, StorageError, open_store
from tests.e2e.job import Job


def _state(seed: int = 0, *, width: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model that has stepped once, its optimizer, and a value."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optim": optimizer, "epoch": seed}


def _bits(state: dict[str, Any]) -> list[Any]:
    """Everything that a load could have changed."""
    model, optimizer = state["model"], state["optim"]
    values: list[Any] = [state["epoch"], repr(optimizer.state_dict()["param_groups"])]
    tensors = list(model.parameters())
    tensors += [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return values + [t.detach().flatten().view(torch.uint8).tolist() for t in tensors]


def _refused(
    error: type[Exception], *texts: str, url: str | Path, state: Any = None, **options: Any
) -> Exception:
    """A load of `url` raises `error` with all `texts` in its message, and changes no bit."""
    state = _state(7) if state is None else state
    before = _bits(state)
    with pytest.raises(error) as caught:
        ckpt.load(state, str(url), **options)
    for text in texts:
        assert text in str(caught.value)
    assert _bits(state) == before
    return caught.value


def _damage(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with steps 1 and 2; step n has the state of seed n."""
    root = tmp_path / "run"
    for step in (1, 2):
        ckpt.save(_state(step), str(root), step=step)
    return root


@pytest.fixture
def newest(root: Path) -> Path:
    """The directory of step 2."""
    return max((root / "steps").iterdir())


# --- urls -----------------------------------------------------------------------------------------


def test_a_url_that_does_not_exist_is_reported_and_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    _refused(NoCheckpoint, str(missing), url=missing)
    assert not missing.parent.exists()


def test_a_directory_that_is_no_checkpoint_is_reported(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    _refused(NoCheckpoint, str(tmp_path), url=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_no_root(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    _refused(Corrupt, str(file), url=file)  # another library's checkpoint may be one
    file = file.with_suffix(".txt")
    file.touch()
    _refused(InvalidUrlError, str(file), url=file)
    with pytest.raises(InvalidUrlError, match="is a file"):
        ckpt.save(_state(), str(file), step=1)


def test_a_step_that_was_never_saved_is_reported_with_those_that_were(root: Path) -> None:
    _refused(NoCheckpoint, "no step 3; it has 2 steps: 1, 2", url=root, step=3)


def test_another_step_than_that_of_a_step_directory_is_reported(newest: Path) -> None:
    _refused(NoCheckpoint, "is of step 2", "step 1 is not here", url=newest, step=1)


def test_a_step_directory_loads_by_its_own_path_copied_anywhere(
    newest: Path, tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(newest, tmp_path / "copied")
    state = _state(7)
    assert ckpt.load(state, str(elsewhere)).step == 2
    assert _bits(state) == _bits(_state(2))


# --- damaged objects ------------------------------------------------------------------------------


def test_a_damaged_log_record_is_reported_and_steps_still_load_by_their_path(
    root: Path, newest: Path
) -> None:
    record = max((root / "log").iterdir())
    _damage(record, 20)
    _refused(Corrupt, record.name, url=root)
    with pytest.raises(Corrupt, match=record.name):
        ckpt.list_steps(str(root))
    state = _state(7)
    ckpt.load(state, str(newest))
    assert _bits(state) == _bits(_state(2))


@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_a_damaged_manifest_is_reported_and_the_older_step_loads(
    root: Path, newest: Path, cut: bool
) -> None:
    manifest = newest / "MANIFEST"
    if cut:
        manifest.write_bytes(manifest.read_bytes()[:-9])
    else:
        _damage(manifest, 40)
    _refused(Corrupt, "MANIFEST", newest.name, "salvage --step 2", url=root)
    _refused(Corrupt, url=newest)
    state = _state(7)
    ckpt.load(state, str(root), step=1)
    assert _bits(state) == _bits(_state(1))


def test_a_missing_manifest_is_reported(root: Path, newest: Path) -> None:
    (newest / "MANIFEST").unlink()
    _refused(Corrupt, "MANIFEST", "missing", "ckpt mend", url=root)


def _data_file(newest: Path) -> Path:
    (file,) = newest.glob("*.safetensors")
    return file


def test_a_damaged_data_file_is_reported_with_file_block_and_tensor(
    root: Path, newest: Path
) -> None:
    file = _data_file(newest)
    _damage(file, 4096)  # the first tensor byte
    state = _state(7)
    with pytest.raises(LoadInterrupted, match=rf"{file.name}: block 0 of '.*' .*checksum"):
        ckpt.load(state, str(root))
    ckpt.load(state, str(root), step=1)
    assert _bits(state) == _bits(_state(1))


@pytest.mark.parametrize("how", ["cut", "missing"])
def test_a_cut_or_missing_data_file_is_reported(root: Path, newest: Path, how: str) -> None:
    file = _data_file(newest)
    if how == "cut":
        file.write_bytes(file.read_bytes()[:4100])
    else:
        file.unlink()
    with pytest.raises(LoadInterrupted, match=file.name):
        ckpt.load(_state(7), str(root))


def test_readers_and_copies_say_of_a_cut_data_file_what_to_do(
    root: Path, newest: Path, tmp_path: Path
) -> None:
    file = _data_file(newest)
    file.write_bytes(file.read_bytes()[:4100])
    text = f"{file.name}.*the file was cut. Load an older step, or restore"
    with ckpt.open(str(root)) as checkpoint, pytest.raises(Corrupt, match=text):
        for fqn in checkpoint:
            _ = checkpoint[fqn]
    with pytest.raises(Corrupt, match=text):
        ckpt.copy(str(root), str(tmp_path / "copy"))


def test_a_newer_version_of_the_format_is_reported(root: Path) -> None:
    text = (root / "FORMAT").read_text()
    (root / "FORMAT").write_text(text.replace(" 1 ", " 2 ", 1))
    _refused(UnsupportedFormat, "FORMAT", "version 2", "upgrade", url=root)
    with pytest.raises(UnsupportedFormat):
        ckpt.list_steps(str(root))


def test_a_manifest_that_names_a_file_outside_of_its_directory_reads_nothing(
    newest: Path, tmp_path: Path
) -> None:
    """The manifest is rewritten, checksum and all, as an attacker would."""
    from dataclasses import replace

    from ckpt.format.manifest_codec import decode_manifest
    from tests.format.encoding import encode_manifest

    shutil.copy(_data_file(newest), tmp_path / "outside.safetensors")
    good = decode_manifest((newest / "MANIFEST").read_bytes())
    for name in (
        "../../../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "..",
        "a/b",
    ):
        (newest / "MANIFEST").unlink()
        (newest / "MANIFEST").write_bytes(encode_manifest(replace(good, files=(name,))))
        with pytest.raises(CheckpointError) as caught:
            ckpt.load(_state(7), str(newest))
        assert not isinstance(caught.value, LoadInterrupted), "it went as far as reading"


def test_a_link_out_of_the_root_is_not_followed_by_writing(root: Path, tmp_path: Path) -> None:
    """Deleting retired and failed attempts touches nothing that we did not write."""
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "MANIFEST").write_text("mine")
    (root / "steps" / "00000009-notours").symlink_to(outside)
    ckpt.save(_state(3), str(root), step=3)
    assert (outside / "MANIFEST").read_text() == "mine"


# --- states that do not fit -----------------------------------------------------------------------


def test_other_names_are_all_reported_at_once(root: Path) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False), nn.Linear(2, 2))
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "epoch": 0}
    names = ["model.3.weight", "model.3.bias", "model.2.bias"]
    failure = _refused(Mismatch, *names, url=root, state=state)
    assert isinstance(failure, Mismatch)
    assert len(failure.problems) >= 3


@pytest.mark.parametrize(
    ("saved", "asked"), [("model", "modle"), ("", "model"), ("module", ""), ("a", "b")]
)
def test_a_missing_name_is_reported_with_the_one_that_differs_in_its_first_part(
    tmp_path: Path, saved: str, asked: str
) -> None:
    names = [f"{first}.0.weight".lstrip(".") for first in (saved, asked)]
    ckpt.save({names[0]: torch.ones(2)}, str(tmp_path / "run"), step=1)
    with pytest.raises(Mismatch, match=rf"{names[1]}: is not .*which has '{names[0]}'; pass"):
        ckpt.load({names[1]: torch.ones(2)}, str(tmp_path / "run"))


def test_other_shapes_are_all_reported_at_once_with_both_sides(root: Path) -> None:
    texts = ["model.0.weight", "model.0.bias", "model.2.weight", "(5, 4)", "(6, 4)"]
    _refused(Mismatch, *texts, url=root, state=_state(7, width=6))


def test_shapes_are_not_forgiven_without_strict(root: Path) -> None:
    _refused(Mismatch, "model.0.weight", url=root, state=_state(7, width=6), strict=False)


def test_another_dtype_is_reported_and_never_cast(root: Path) -> None:
    state = _state(7, dtype=torch.float64)
    _refused(Mismatch, "model.0.weight", "float32", "float64", url=root, state=state)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, 1 << 64], ids=repr)
def test_a_step_that_is_no_step_is_reported_before_anything_is_written(
    tmp_path: Path, step: Any
) -> None:
    with pytest.raises(InvalidArgument, match="step="):
        ckpt.save(_state(), str(tmp_path / "run"), step=step)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_notes_that_are_no_text_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="user"):
        ckpt.save(_state(), str(tmp_path / "run"), step=1, user={"lr": 0.1})  # type: ignore[dict-item]


@pytest.mark.parametrize("option", [{"replicas": "never"}, {"io": "fast"}], ids=["replicas", "io"])
def test_an_option_that_does_not_exist_is_reported(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.*expected"):
        ckpt.save(_state(), str(tmp_path / "run"), step=1, **option)


def test_what_cannot_be_saved_is_named_and_the_root_stays_as_it_was(root: Path) -> None:
    before = sorted(str(path) for path in root.rglob("*"))
    state = {**_state(3), "lambda": lambda: 0, "object": object()}
    with pytest.raises(InvalidState) as caught:
        ckpt.save(state, str(root), step=3)
    assert "lambda" in str(caught.value)
    assert "object" in str(caught.value)
    assert len(caught.value.problems) == 2
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_text_that_is_no_unicode_is_named(tmp_path: Path) -> None:
    """As os.listdir gives for names that are no UTF-8: a training hears of it at once."""
    state = _state() | {"files": ["a", os.fsdecode(b"b\xff")]}
    with pytest.raises(InvalidState, match=r"files\.1: 'b\\udcff' is no unicode"):
        ckpt.save(state, tmp_path / "run", step=1)


@pytest.mark.parametrize("state", [{}, []], ids=repr)
def test_a_load_into_an_empty_state_says_that_it_loads_nothing(root: Path, state: Any) -> None:
    (warning,) = ckpt.load(state, root).warnings
    assert "the state is empty" in warning and "ckpt.open(url)" in warning and not state


def test_a_lazy_module_is_named_by_a_save(tmp_path: Path) -> None:
    state = {"model": torch.nn.Sequential(torch.nn.LazyLinear(2))}
    with pytest.raises(InvalidState, match=r"model\.0\.weight: is not initialized yet"):
        ckpt.save(state, tmp_path / "run", step=1)


# --- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def ordinary_user(tmp_path: Path) -> Iterator[None]:
    """Root may write everywhere: take that away for the test."""
    if os.geteuid() != 0:
        yield
        return
    for path in (tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o055)
        if path.name.startswith("pytest-of"):
            break
    for path in tmp_path.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_root_loads_and_refuses_a_save(
    root: Path, request: pytest.FixtureRequest
) -> None:
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(str(path) for path in root.rglob("*"))
    request.getfixturevalue("ordinary_user")
    with pytest.raises(StorageError, match=r"(?i)denied|read-only|permission"):
        ckpt.save(_state(3), str(root), step=3)
    assert sorted(str(path) for path in root.rglob("*")) == before
    state = _state(7)
    ckpt.load(state, str(root))
    assert _bits(state) == _bits(_state(2))


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts a file system of so many bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted: list[Path] = []

    def make(nbytes: int) -> Path:
        target = tmp_path / f"disk{len(mounted)}"
        target.mkdir()
        options = f"size={nbytes}".encode()
        if os.geteuid() != 0 or libc.mount(b"tmpfs", bytes(target), b"tmpfs", 0, options):
            pytest.skip("may not mount a small file system here")
        mounted.append(target)
        return target

    yield make
    for target in mounted:
        libc.umount2(bytes(target), 2)


def test_a_full_disk_is_reported_and_keeps_nothing_of_the_failed_save(
    mount: Callable[[int], Path],
) -> None:
    root = mount(1 << 20) / "run"
    ckpt.save({"t": torch.arange(1000.0)}, str(root), step=1)
    files = sorted(path.name for path in root.rglob("*.safetensors"))
    with pytest.raises(NoSpaceError, match=r"(?i)space"):
        ckpt.save({"t": torch.zeros(1 << 20)}, str(root), step=2)
    assert sorted(path.name for path in root.rglob("*.safetensors")) == files
    assert not list(root.glob("steps/00000002-*/*"))
    ckpt.save({"t": torch.arange(2000.0)}, str(root), step=3)
    state = {"t": torch.zeros(2000)}
    assert ckpt.load(state, str(root)).step == 3
    assert torch.equal(state["t"], torch.arange(2000.0))


# --- spellings ------------------------------------------------------------------------------------


def test_spellings_of_one_place_are_one_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that writes `run` now and `run/` later must not fence itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    spellings = ["run", "run/", "./run", str(tmp_path / "run"), f"file://{tmp_path}/run", "link"]
    for step, url in enumerate([*spellings, *reversed(spellings)], 1):
        ckpt.save({"step": step}, url, step=step)
    for url in spellings:
        assert [info.step for info in ckpt.list_steps(url)] == list(range(1, 13))
        state = {"step": 0}
        ckpt.load(state, url)
        assert state["step"] == 12


@pytest.mark.parametrize("made_anew", [False, True], ids=["gone", "another"])
def test_a_root_that_was_removed_under_a_running_job_is_reported(
    tmp_path: Path, made_anew: bool
) -> None:
    """A save there would be one that nobody finds, or would mix two roots."""
    root = tmp_path / "run"
    ckpt.save(_state(1), str(root), step=1)
    shutil.rmtree(root)
    if made_anew:
        Job(1, lambda rank: open_store(str(root))).save(lambda rank: _state(3), step=3)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(StoreRefused, match="removed meanwhile"):
        ckpt.save(_state(2), str(root), step=2)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    if made_anew:
        state = _state(7)
        assert ckpt.load(state, str(root)).step == 3
        assert _bits(state) == _bits(_state(3))
    else:
        _refused(NoCheckpoint, url=root)


@pytest.mark.parametrize("metric", [float("inf"), float("nan"), torch.tensor(-torch.inf), "high"])
@pytest.mark.parametrize("way", ["save", "async_save"])
def test_a_metric_that_is_no_number_writes_nothing(root: Path, metric: Any, way: str) -> None:
    before = sorted(root.rglob("*"))
    with pytest.raises(InvalidArgument, match=r"metric=.*expected a finite number"):
        if way == "save":
            ckpt.save(_state(3), str(root), step=3, metric=metric)
        else:
            ckpt.async_save(_state(3), str(root), step=3, metric=metric).result()
    assert sorted(root.rglob("*")) == before
    ckpt.save(_state(3), str(root), step=3, metric=torch.tensor(0.5))
    assert ckpt.list_steps(str(root))[-1].metric == 0.5


def test_notes_with_names_of_the_library_are_refused(root: Path) -> None:
    """Committed, "ckpt.publication" made a manifest that nobody could read."""
    with pytest.raises(InvalidArgument, match=r"'ckpt\.publication'.*library's"):
        ckpt.save(_state(3), str(root), step=3, user={"ckpt.publication": "x"})
