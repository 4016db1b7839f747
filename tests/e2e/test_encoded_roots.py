"""Whole jobs over encrypted and compressed roots: everything that works in a plain one.

Method: the public functions and commands with `storage_options`; what lies in the root is read
beneath. What must not be readable there is a text that the state has as a value.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.commit.log import read_format
from ckpt.errors import Corrupt, LoadInterrupted, UnsupportedFormat
from ckpt.saving.task import SaveOptions
from storage import AccessDeniedError, ByteRange, InvalidUrlError, Store, open_store
from storage.encoding.store import EncodedStore, EncodingOptions
from storage.local import LocalStore
from storage.memory import MemoryBucket, MemoryStore
from storage.wrap import WrappedStore
from tests.e2e.job import Job, assert_is_step, state_at

pytest.importorskip("cryptography", reason="the extra 'encode' is not installed")
pytest.importorskip("zstandard", reason="the extra 'encode' is not installed")

SECRET = os.urandom(32)
BOTH: dict[str, Any] = {"encryption_key": SECRET, "compression": "zstd"}
SAID = "a text that nobody else may read " * 10


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((300_000,), value), "n": {"note": SAID * bool(value), "step": value}}


def options_of(tmp_path: Path) -> list[str]:
    """As a command takes them."""
    file = tmp_path / "key"
    file.write_text(SECRET.hex())
    file.chmod(0o600)
    return ["-o", f"encryption_key={file}"]


def assert_hidden(root: Path) -> None:
    for path in root.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"nobody else" not in data and b"dtype" not in data, path


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Two steps, saved at once and in the background."""
    url = str(tmp_path / "run")
    ckpt.save(state(1.0), url, step=1, storage_options=BOTH)
    ckpt.async_save(state(2.0), url, step=2, storage_options=BOTH).result()
    return url


def test_saves_and_loads(root: str) -> None:
    for options in (BOTH, {"encryption_key": SECRET}):
        for step in (1, 2):
            loaded = state()
            ckpt.load(loaded, root, step=step, storage_options=options)
            assert torch.equal(loaded["w"], state(float(step))["w"]) and loaded["n"]["note"] == SAID
        assert [info.step for info in ckpt.list_steps(root, options)] == [1, 2]
        assert ckpt.verify(root, storage_options=options).ok
        with ckpt.open(root, 1, storage_options=options) as opened:
            assert float(opened["w"][299_999]) == 1.0
            directory = opened.url
    with ckpt.open(directory, storage_options=options) as opened:
        assert float(opened["w"][0]) == 1.0 and opened.step == 1
    assert_hidden(Path(root))
    sizes = [path.stat().st_size for path in Path(root).rglob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 100_000, "1.2 MB of one number each"


def test_readers_without_the_key_or_of_an_older_version_are_refused_clearly(root: str) -> None:
    uses: list[Callable[[], object]] = [
        lambda: ckpt.load(state(), root),
        lambda: ckpt.list_steps(root),
        lambda: ckpt.save(state(3.0), root, step=3),
        lambda: ckpt.verify(root),
        lambda: ckpt.open(str(next(Path(root, "steps").iterdir()))),
    ]
    for use in uses:
        with pytest.raises(AccessDeniedError, match="encrypted with the key"):
            use()
    # What a version before this one has: the store of the storage alone.
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        read_format(LocalStore(root))
    with pytest.raises(AccessDeniedError, match="is encrypted with the key") as wrong:
        ckpt.load(state(), root, storage_options={"encryption_key": b"x" * 32})
    assert "pass the key that the root was made with" in str(wrong.value)


def test_a_root_that_is_compressed_alone_needs_nothing_to_be_said(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    ckpt.save(state(1.0), url, step=1, storage_options={"compression": "zstd"})
    ckpt.save(state(2.0), url, step=2)
    ckpt.load(loaded := state(), url)
    assert float(loaded["w"][0]) == 2.0 and ckpt.verify(url).ok
    assert max(path.stat().st_size for path in Path(url).rglob("*.safetensors")) < 100_000
    assert main(["verify", url]) == main(["ls", url]) == main(["du", url]) == 0


def test_ranks_save_with_dedup_and_other_counts_resume(tmp_path: Path) -> None:
    job = Job(3, lambda rank: open_store(str(tmp_path), **BOTH), memories={})
    for step in (1, 2):
        states = [state_at(step, rank, 3) for rank in range(3)]
        job.save(
            lambda rank, states=states: states[rank],  # type: ignore[misc]
            step=step,
            options=SaveOptions(dedup=True),
        )
    assert_hidden(tmp_path)
    for size in (1, 2, 4):
        states = [state_at(0, rank, size) for rank in range(size)]
        other = Job(size, lambda rank: open_store(str(tmp_path), encryption_key=SECRET))
        other.load(lambda rank, states=states: states[rank], step=2)  # type: ignore[misc]
        for rank in range(size):
            assert_is_step(states[rank], 2, rank, size)


def trained(url: str, steps: int, **more: Any) -> tuple[int, float]:
    """A training of so many steps; where it was resumed, and its weight at the end."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    with ckpt.Checkpointer({"model": model}, url, save=ckpt.EverySteps(1), **more) as checkpointer:
        report = checkpointer.restore()
        begun = 0 if report is None else report.step
        for step in range(begun + 1, begun + steps + 1):
            with torch.no_grad():
                model.weight += 1.0
            checkpointer.step(step)
    return begun, float(model.weight.detach()[0, 0])


def test_a_training_is_resumed_and_retention_deletes(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    more: dict[str, Any] = {"keep": ckpt.KeepLatest(2), "storage_options": BOTH}
    assert trained(url, 4, **more) == (0, 4.0)
    assert trained(url, 3, **more) == (4, 7.0)
    assert [info.step for info in ckpt.list_steps(url, BOTH)] == [6, 7]
    assert len(list(Path(url, "steps").iterdir())) == 2


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_damage_is_corrupt_and_a_training_falls_back(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    more: dict[str, Any] = {"storage_options": BOTH}
    trained(url, 3, **more)
    directories = sorted(Path(url, "steps").iterdir())
    for path in sorted(directories[-1].iterdir()):
        if path.name == "TELEMETRY":
            continue
        for position in (20, path.stat().st_size // 2, path.stat().st_size - 40):
            flip(path, position)
            ckpt.forget(url, **more)  # of an object that was read before, the index is known
            with pytest.raises((Corrupt, LoadInterrupted), match=path.name):
                ckpt.load({"model": nn.Linear(4, 4, bias=False)}, url, **more)
            flip(path, position)
    ckpt.load({"model": nn.Linear(4, 4, bias=False)}, url, **more)
    data_file = next(directories[-1].glob("*.safetensors"))
    flip(data_file, data_file.stat().st_size // 2)
    report = ckpt.verify(url, **more)
    assert not report.ok and data_file.name in str(report.damage[0])
    begun, weight = trained(url, 1, **more)
    assert (begun, weight) == (2, 3.0), "the newest that is whole"


def test_a_damaged_log_or_format_is_corrupt(root: str) -> None:
    for path in (Path(root, "FORMAT"), max(Path(root, "log").iterdir())):
        for position in (30, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, position)
            with pytest.raises(Corrupt, match=path.name):
                ckpt.list_steps(root, BOTH)
            flip(path, position)
    assert len(ckpt.list_steps(root, BOTH)) == 2


def test_a_copy_into_another_root_is_the_rotation_of_its_key(root: str, tmp_path: Path) -> None:
    rotated, plain, same = (str(tmp_path / name) for name in ("rotated", "plain", "same"))
    new = {"encryption_key": lambda key_id: b"n" * 32}
    nothing = {"encryption_key": None, "compression": None}
    for target, options in ((rotated, new), (same, {}), (plain, nothing)):
        ckpt.copy(root, target, root=True, storage_options=BOTH, other_options=options)
    assert_hidden(tmp_path / "rotated")
    assert_hidden(tmp_path / "same")
    for url, options in ((rotated, new), (same, BOTH), (plain, {})):
        ckpt.load(loaded := state(), url, storage_options=options)
        assert float(loaded["w"][0]) == 2.0 and ckpt.verify(url, storage_options=options).ok
    with pytest.raises(AccessDeniedError, match="encryption_key is the key"):
        ckpt.load(state(), rotated, storage_options=BOTH)
    with pytest.raises(InvalidUrlError, match="is not encoded"):
        ckpt.load(state(), plain, storage_options=BOTH)
    single = str(tmp_path / "single")
    ckpt.copy(root, single, step=1, storage_options=BOTH)
    assert_hidden(tmp_path / "single")
    ckpt.load(loaded := state(), single, storage_options=BOTH)
    assert float(loaded["w"][0]) == 1.0


def test_an_export_is_plain(root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "out.safetensors")
    model = nn.Linear(3, 5)
    ckpt.save({"model": model}, root, step=3, storage_options=BOTH)
    ckpt.export(root, target, storage_options=BOTH)
    assert torch.equal(load_file(target)["weight"], model.weight)
    with pytest.raises(InvalidUrlError, match="leave out encryption_key"):
        ckpt.export(root, target, storage_options=BOTH, other_options=BOTH)


@pytest.mark.parametrize("by_directory", [False, True])
def test_salvage_rebuilds_a_manifest(root: str, tmp_path: Path, by_directory: bool) -> None:
    directory = max(Path(root, "steps").iterdir())
    manifest = directory / "MANIFEST"
    manifest.unlink()
    url = str(directory) if by_directory else root
    assert main(["salvage", url, *options_of(tmp_path)]) == 0
    assert manifest.exists() and ckpt.verify(root, storage_options=BOTH).ok
    assert_hidden(Path(root))


def test_commands_take_the_key(root: str, tmp_path: Path) -> None:
    key = options_of(tmp_path)
    file = key[1].partition("=")[2]
    new, plain = str(tmp_path / "new"), str(tmp_path / "plain")
    Path(file + "2").write_bytes(b"n" * 32)
    Path(file + "2").chmod(0o600)
    for target, more in (
        (new, ["--other-key-file", file + "2"]),
        (plain, ["--other-option", "encryption_key=null"]),
    ):
        assert main(["cp", "--root", root, target, "--key-file", file, *more]) == 0
    assert main(["verify", new, "--key-file", file + "2"]) == main(["verify", plain]) == 0
    assert_hidden(Path(new))
    both = ["--key-file", file, "--other-key-file", file + "2"]
    assert main(["diff", root, new, *both]) == 0
    for command in ("ls", "show", "verify", "log", "du", "report"):
        more = ["--out", str(tmp_path / "page.html")] if command == "report" else []
        assert main([command, root, *key, *more]) == 0, command
        assert main([command, root]) != 0, command
    assert main(["rm", root, "--step", "2", "--yes", *key]) == 0
    ckpt.save(state(3.0), root, step=3, storage_options=BOTH)
    assert main(["prune", root, "--keep-last", "1", "--yes", *key]) == 0
    assert [info.step for info in ckpt.list_steps(root, BOTH)] == [3]


class Asked(WrappedStore):
    """Notes which keys were requested."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.keys.append(key)
        return self.inner.get(key, byte_range)

    def get_bounded(self, key: str, nbytes_max: int) -> bytes:
        self.keys.append(key)
        return self.inner.get_bounded(key, nbytes_max)


@pytest.mark.parametrize("options", [{}, {"encryption_key": b"x" * 32}, {"compression": "zstd"}])
def test_only_the_coordinator_of_a_load_asks_how_a_root_is_encoded(options: dict[str, Any]) -> None:
    bucket = MemoryBucket()

    def opened(inner: Store) -> EncodedStore:
        return EncodedStore(inner, EncodingOptions.taken_from(dict(options)))

    saved = Job(3, lambda rank: opened(MemoryStore(bucket)))
    saved.save(lambda rank: state_at(1, rank, 3), step=1)
    asked = [Asked(MemoryStore(bucket)) for _ in range(4)]
    loaded = [state_at(0, rank, 4) for rank in range(4)]
    Job(4, [opened(one) for one in asked].__getitem__).load(loaded.__getitem__, step=1)
    for rank, one in enumerate(loaded):
        assert_is_step(one, 1, rank, 4)
    assert [one.keys.count("FORMAT") > 0 for one in asked] == [True, False, False, False]


# --- keys are bound to root and step ----------------------------------------------------------


def exchange(here: Path, other: Path, names: Iterable[str]) -> None:
    """What `other` has under these names lies in `here` as well."""
    for name in names:
        shutil.rmtree(here / name, ignore_errors=True)
        if (other / name).is_dir():
            shutil.copytree(other / name, here / name)
        else:
            shutil.copy(other / name, here / name)


def step_folder(root: str, step: int) -> Path:
    return next(Path(root, "steps").glob(f"{step:08d}-*"))


@pytest.mark.parametrize("options", [BOTH, {"compression": "zstd"}])
def test_a_step_in_place_of_another_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    url = str(tmp_path / "run")
    for step in (1, 2):
        ckpt.save(state(float(step)), url, step=step, storage_options=options)
    ckpt.forget(url)
    old, new = step_folder(url, 1), step_folder(url, 2)
    shutil.copytree(old, tmp_path / "renamed")
    shutil.rmtree(new)
    shutil.copytree(old, new)
    with pytest.raises(Corrupt, match=f"is the object steps/{old.name}"):
        ckpt.load(state(), str(new), storage_options=options)
    with pytest.raises(Corrupt):
        ckpt.load(state(), url, step=2, storage_options=options)
    # A name that is no step's says of no step that it is this one.
    assert ckpt.load(state(), str(tmp_path / "renamed"), storage_options=options).step == 1


@pytest.mark.parametrize("options", [BOTH, {"compression": "zstd"}])
def test_another_root_of_the_same_key_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for root, value in ((here, 1.0), (other, 2.0)):
        ckpt.save(state(value), root, step=1, storage_options=options)
    ids = [read_format(open_store(root, **options)) for root in (here, other)]
    exchange(here, other, ["log", "steps"])
    ckpt.forget(str(here))
    with pytest.raises(Corrupt, match=f"of the root {ids[1]}, and this is {ids[0]}"):
        ckpt.load(state(), here, storage_options=options)


@pytest.mark.parametrize("options", [BOTH, {"compression": "zstd"}, {}])
def test_expect_root_refuses_every_other_root(tmp_path: Path, options: dict[str, Any]) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for root, value in ((here, 1.0), (other, 2.0)):
        ckpt.save(state(value), root, step=1, storage_options=options)
    ids = [read_format(open_store(root, **options)) for root in (here, other)]
    own = {**options, "expect_root": ids[0]}
    assert ckpt.load(state(), here, storage_options=own).step == 1
    ckpt.save(state(3.0), here, step=2, storage_options=own)
    copied = ckpt.copy(here, tmp_path / "copy", root=True, storage_options=own)
    assert copied.steps == (1, 2), "a copy is a root of its own"
    exchange(here, other, ["FORMAT", "log", "steps"])
    ckpt.forget(str(here))
    uses: list[Callable[[], object]] = [
        lambda: ckpt.load(state(), here, storage_options=own),
        lambda: ckpt.save(state(), here, step=9, storage_options=own),
        lambda: ckpt.save(state(), tmp_path / "new", step=9, storage_options=own),
        lambda: ckpt.load(state(), step_folder(str(here), 1), storage_options=own),
    ]
    for use in uses:
        with pytest.raises(InvalidUrlError, match=f"expect_root is {ids[0]}"):
            use()
    assert not (tmp_path / "new" / "FORMAT").exists()
    assert ckpt.load(state(), here, storage_options=options).step == 1, "unless nobody asks"
    for bad in (ids[0][:-1], 5, ""):
        with pytest.raises(InvalidUrlError, match="32 hex digits"):
            open_store(here, **options, expect_root=bad)


def test_copies_of_encrypted_roots_load_and_go_on(root: str, tmp_path: Path) -> None:
    target = str(tmp_path / "copy")
    ckpt.copy(root, target, root=True, storage_options=BOTH)
    assert ckpt.verify(target, storage_options=BOTH).ok
    ckpt.save(state(3.0), target, step=3, storage_options=BOTH)
    assert [info.step for info in ckpt.list_steps(target, BOTH)] == [1, 2, 3]
    single = tmp_path / step_folder(root, 1).name
    ckpt.copy(root, single, step=1, storage_options=BOTH)
    assert ckpt.load(state(), single, storage_options=BOTH).step == 1


def test_near_tiers_of_an_encrypted_root_are_hidden(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    near = ckpt.Near(tier, every=ckpt.EverySteps(1))
    for key in (SECRET, lambda wanted: SECRET):
        more: dict[str, Any] = {"near": near, "storage_options": {"encryption_key": key}}
        url = str(tmp_path / type(key).__name__)
        assert trained(url, 2, **more) == (0, 2.0)
        shutil.rmtree(step_folder(url, 2))  # the near one is newer than what is left
        assert trained(url, 1, **more) == (2, 3.0)
    assert len([*tier.rglob("*.safetensors")]) >= 2
    assert_hidden(tier)


def shown_by(thing: object, seen: set[int], depth: int = 8) -> Iterator[str]:
    """The reprs of `thing` and of its attributes, as a debugger shows them."""
    if not depth or id(thing) in seen or isinstance(thing, ModuleType | type | FunctionType):
        return
    seen.add(id(thing))
    yield repr(thing)
    own = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    own += getattr(thing, "__dict__", {}).values()
    own += thing.values() if isinstance(thing, dict) else ()
    own += thing if isinstance(thing, tuple | list) else ()
    for value in own:
        yield from shown_by(value, seen, depth - 1)


def test_no_attribute_of_a_checkpointer_shows_a_key(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for key in (SECRET, bytearray(SECRET)):
        model = nn.Linear(2, 2)
        options = {"encryption_key": key}
        checkpointer = ckpt.Checkpointer({"model": model}, url, storage_options=options)
        with checkpointer:
            text = " ".join(shown_by(checkpointer, set()))
        assert url in text and repr(SECRET)[2:-1] not in text
        assert options == {"encryption_key": key}, "the caller's own stay as they are"


def test_calls_with_a_key_share_the_session(tmp_path: Path) -> None:
    """A Checkpointer hides the key that it was given; it is the same root as before to others."""
    url, key = str(tmp_path / "run"), {"encryption_key": SECRET}
    model = nn.Linear(2, 2)
    with ckpt.Checkpointer(
        {"model": model}, url, save=ckpt.EverySteps(1), storage_options=key
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step)
            ckpt.save({"w": torch.zeros(3)}, url, step=step + 10, storage_options=key)
    assert not checkpointer.failures
    epochs = {entry.attempt.split("-")[0] for entry in ckpt.list_steps(url, key)}
    assert len(epochs) == 1, "one claim"
