"""Exported files are what safetensors itself would have written, and nothing is left by a failure.

Peers: `safetensors.torch` reads every file, and the model loads it with strict=True.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import ckpt
import ckpt.convert.export
from ckpt.operate.arguments import nbytes as parse_nbytes
from storage import open_store
from tests.stores import CountingStore
from tests.tools.conftest import data_files, make_net, sliced_net, stepped
from tests.tools.test_model_folder import Tiny


def _header(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return dict(json.loads(file.read(length)))


def test_sliced_checkpoint_becomes_the_bare_model(sliced_root: str, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    report = ckpt.export(sliced_root, str(target))
    assert report.nbytes == target.stat().st_size and report.files == (str(target),)
    tensors = load_file(target)
    torch.manual_seed(1)
    fresh = sliced_net()
    fresh.load_state_dict(tensors, strict=True)
    for name, tensor in sliced_net().state_dict().items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype


def test_parts_smaller_than_tensors_and_unaligned_chunks(
    sliced_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parts per tensor, several threads: the assembled bytes are still those of the model."""
    monkeypatch.setattr(ckpt.convert.export, "PART_NBYTES", 4096)
    ckpt.export(sliced_root, str(tmp_path / "m.safetensors"), threads=4)
    tensors = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(tensors[k], v) for k, v in sliced_net().state_dict().items())


def test_the_first_of_tied_names_is_kept(plain_root: str, tmp_path: Path) -> None:
    """The file notes the other one, so that load_model is satisfied."""
    target = tmp_path / "model.safetensors"
    with pytest.raises(ckpt.errors.CheckpointError, match="nothing to export"):
        ckpt.export(plain_root, str(target), entry="nope")
    report = ckpt.export(plain_root, str(target), entry="model")
    assert report.tied == {"head.weight": "embed.weight"}
    assert _header(target)["__metadata__"] == {"format": "pt", "head.weight": "embed.weight"}
    net = make_net(99)
    missing, unexpected = load_model(net, str(target), strict=True)
    assert not missing and not unexpected
    for name, tensor in stepped(10).state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor), name


def test_what_modules_share_has_a_base_models_name_in_both(tmp_path: Path) -> None:
    """The second of them has two names, of which that of the head is first in the alphabet."""
    model = Tiny()
    ckpt.save({"base": model.model, "lm": model}, tmp_path / "run", step=1)
    report = ckpt.export(tmp_path / "run", str(tmp_path / "m.safetensors"), entry="lm")
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_keep_tied_writes_all_names(plain_root: str, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    ckpt.export(plain_root, str(target), keep_tied=True)
    net = make_net(99)
    net.load_state_dict(load_file(target), strict=True)


def test_optimizer_and_dicts_stay_out_by_default(plain_root: str, tmp_path: Path) -> None:
    report = ckpt.export(plain_root, str(tmp_path / "m.safetensors"))
    assert set(report.tensors) | set(report.tied) == set(make_net().state_dict())


def test_entry_may_be_a_dict_of_tensors(plain_root: str, tmp_path: Path) -> None:
    ckpt.export(plain_root, str(tmp_path / "m.safetensors"), entry="ema")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["big"], stepped(10).big * 0.5)


def test_two_models_need_a_choice(tmp_path: Path) -> None:
    state = {"student": torch.nn.Linear(2, 2), "teacher": torch.nn.Linear(2, 2)}
    ckpt.save(state, str(tmp_path / "run"), step=0)
    with pytest.raises(ckpt.errors.CheckpointError, match=r"entry=.*'student', 'teacher'"):
        ckpt.export(str(tmp_path / "run"), str(tmp_path / "m.safetensors"))


def test_bare_module_keeps_its_names(tmp_path: Path) -> None:
    """A module saved as the state itself, whose names all begin alike, loses no part of them."""
    net = torch.nn.Sequential()
    net.add_module("only", torch.nn.Linear(2, 3))
    ckpt.save(net, str(tmp_path / "run"), step=0)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "m.safetensors"))
    net.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)


def test_model_may_stand_deep_in_the_state(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 3)
    ckpt.save({"train": {"net": net, "loss": torch.nn.MSELoss()}}, str(tmp_path / "run"), step=0)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "m.safetensors"))
    net.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)


def test_dtype_applies_to_floats_alone(sliced_root: str, plain_root: str, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    ckpt.export(plain_root, str(target), dtype=torch.bfloat16)
    tensors = load_file(target)
    expected = stepped(10).state_dict()
    assert tensors["flags"].dtype == torch.bool
    assert tensors["body.1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(tensors["big"], expected["big"].bfloat16())
    assert torch.equal(tensors["scalar"], expected["scalar"].bfloat16())
    ckpt.export(sliced_root, str(tmp_path / "w.safetensors"), dtype="float64")
    wide = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(wide[k], v.double()) for k, v in sliced_net().state_dict().items())


def test_names_are_chosen_and_changed(sliced_root: str, tmp_path: Path) -> None:
    selection = dict(include=["*weight"], exclude=["2.*"], rename=lambda name: f"x.{name}")
    report = ckpt.export(sliced_root, str(tmp_path / "m.safetensors"), **selection)
    assert report.tensors == ("x.0.weight", "x.1.weight")
    with pytest.raises(ckpt.errors.CheckpointError, match="one name, 'y'"):
        clash = dict(rename=lambda name: "y")
        ckpt.export(sliced_root, str(tmp_path / "n.safetensors"), **clash)


def test_several_files_have_the_index_of_hugging_face(sliced_root: str, tmp_path: Path) -> None:
    report = ckpt.export(sliced_root, str(tmp_path / "model.safetensors"), shard_bytes_max=10_000)
    names = [Path(file).name for file in report.files]
    count = len(names) - 1
    assert count > 1
    assert names[:-1] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert names[-1] == "model.safetensors.index.json"
    index = json.loads((tmp_path / names[-1]).read_text())
    expected = sliced_net().state_dict()
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), expected[name])


def test_one_file_when_all_fits(sliced_root: str, tmp_path: Path) -> None:
    report = ckpt.export(sliced_root, str(tmp_path / "m.safetensors"), shard_bytes_max=10**9)
    assert [Path(file).name for file in report.files] == ["m.safetensors"]


def test_tensors_are_in_the_order_of_safetensors(plain_root: str, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    ckpt.export(plain_root, str(target))
    header = _header(target)
    del header["__metadata__"]
    width = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "BOOL": 1}
    order = [(-width[e["dtype"]], e["data_offsets"][0], n) for n, e in header.items()]  # type: ignore[index]
    assert order == sorted(order)
    assert all(start % -size == 0 for size, start, _ in order)


def test_damage_stops_the_export_and_leaves_nothing(sliced_root: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(sliced_root, root)
    path = data_files(str(root))[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    out = tmp_path / "out"
    with pytest.raises(ckpt.errors.Corrupt, match=f"{path.name}: block"):
        ckpt.export(str(root), str(out / "m.safetensors"))
    with pytest.raises(ckpt.errors.Corrupt, match=f"{path.name}: block"):
        ckpt.export(str(root), str(out / "m.safetensors"), shard_bytes_max=2000)
    assert not [p for p in out.rglob("*") if p.is_file()]


def test_existing_target_is_not_touched(sliced_root: str, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    target.write_text("mine")
    with pytest.raises(ckpt.errors.CheckpointError, match="exists already"):
        ckpt.export(sliced_root, str(target))
    assert target.read_text() == "mine"


def test_target_may_be_another_store(sliced_root: str) -> None:
    ckpt.export(sliced_root, "memory://export-target/a/m.safetensors")
    data = open_store("memory://export-target").get("a/m.safetensors")
    from safetensors.torch import load

    assert torch.equal(load(data)["0.weight"], sliced_net()[0].weight)


@pytest.mark.parametrize("target", ["out", "out/", "x.txt", ".safetensors"])
def test_target_must_be_a_safetensors_name(sliced_root: str, target: str) -> None:
    with pytest.raises(ckpt.errors.CheckpointError, match=r"model\.safetensors"):
        ckpt.export(sliced_root, target)


def test_dtypes_that_safetensors_lacks_are_refused_by_name(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2, bias=False)
    net.register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
    ckpt.save({"m": net}, str(tmp_path / "run"), step=0)
    with pytest.raises(ckpt.errors.InvalidState, match="phase: safetensors has no complex128"):
        ckpt.export(str(tmp_path / "run"), str(tmp_path / "m.safetensors"))


def test_stored_bytes_are_read_about_once(
    plain_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts: what an export reads is what it writes, but for blocks that two parts share."""
    opened: list[CountingStore] = []

    def counted(url: str, **options: object) -> CountingStore:
        opened.append(CountingStore(open_store(url)))
        return opened[-1]

    monkeypatch.setattr(ckpt.convert.export, "open_store", counted)
    report = ckpt.export(plain_root, str(tmp_path / "m.safetensors"))
    assert opened[0].stats.bytes_read <= 1.05 * report.nbytes + 100_000


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("1.5kb", 1500), ("700", 700), ("3 MB", 3 * 10**6)],
)
def test_sizes_are_parsed(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "five"])
def test_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_nbytes(text)
