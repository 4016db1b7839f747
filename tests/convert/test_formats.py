"""Every format in, every format out: right to the bit, or refused by name.

Method: one state with all dtypes, 0-d, empty, tied, strided and int and bool tensors is written by
torch and safetensors themselves, imported and exported, and read back by them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckpt
from ckpt.convert import formats
from ckpt.convert.sources import opening
from ckpt.convert.sources.opening import SourceOptions, open_source
from ckpt.errors import CheckpointError, Corrupt, InvalidState, NoCheckpoint, UnsupportedFormat
from ckpt.layout.dtypes import DTYPES
from tests.convert.jobs import assert_same, fresh, full_of, optimizer_of, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning"),
]

HERE = {name: one for name, one in DTYPES.items() if hasattr(torch, name)}  # 2.6 lacks some
SAFE = [name for name, dtype in HERE.items() if dtype.is_native]
# torch's own writers know no others; tests/state/test_kinds.py has all.
TORCH = [name for name in HERE if name.strip("uint") not in set("1234567") and "bits" not in name]


def of_dtype(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    raw = torch.arange(48 * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    return (raw % 2).bool()[:48] if name == "bool" else raw.view(dtype).view(6, 8)


def everything(names: list[str]) -> dict[str, torch.Tensor]:
    base = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    return {
        **{f"dtype.{name}": of_dtype(name) for name in names},
        "zero_dim": torch.tensor(2.5),
        "zero_dim_int": torch.tensor(-3),
        "zero_dim_bool": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "part": base[3:9, 2:7],
        "steps": base.view(-1)[5:50:3],
    }


def opened(url: str) -> dict[str, torch.Tensor]:
    source = open_source(url)
    try:
        names = (*source.contents.tensors, *source.contents.aliases)
        return {name: source.read(name) for name in names}
    finally:
        source.close()


def test_dcp_has_all_dtypes(tmp_path: Path) -> None:
    state = everything(TORCH)
    dcp.save(dict(state), checkpoint_id=tmp_path / "in")
    assert_same(opened(str(tmp_path / "in")), state)
    ckpt.import_checkpoint(str(tmp_path / "in"), str(tmp_path / "run"), verify=True)
    with ckpt.open(str(tmp_path / "run")) as checkpoint:
        assert_same({name: checkpoint[name] for name in checkpoint}, state)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out"), format="dcp", verify=True)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(wanted, checkpoint_id=tmp_path / "out")
    assert_same(wanted, state)


def test_torch_save_has_all_dtypes(tmp_path: Path) -> None:
    state = everything(TORCH)
    torch.save(state, tmp_path / "in.pt")
    assert_same(opened(str(tmp_path / "in.pt")), state)
    ckpt.import_checkpoint(str(tmp_path / "in.pt"), str(tmp_path / "run"), verify=True)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out.pt"), verify=True)
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), state)
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True, mmap=True), state)


def test_safetensors_has_its_dtypes_and_others_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in everything(SAFE).items()}
    save_file(state, tmp_path / "in.safetensors")
    assert_same(opened(str(tmp_path / "in.safetensors")), state)
    ckpt.import_checkpoint(str(tmp_path / "in.safetensors"), str(tmp_path / "run"), verify=True)
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out.safetensors"), verify=True)
    assert_same(load_file(tmp_path / "out.safetensors"), state)
    torch.save(everything(TORCH), tmp_path / "all.pt")
    with pytest.raises(InvalidState, match=r"dtype\.complex128: safetensors has no complex128"):
        ckpt.export(str(tmp_path / "all.pt"), str(tmp_path / "no.safetensors"))
    assert not (tmp_path / "no.safetensors").exists()


def test_what_has_no_layout_is_refused_by_name(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "conj": torch.ones(3, dtype=torch.complex64).conj(),
        "fine": torch.ones(2),
    }
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(InvalidState) as caught:
        ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    for name, reason in [("quantized", "quantized"), ("sparse", "sparse"), ("conj", "conjugate")]:
        assert any(p.startswith(f"{name}: ") and reason in p for p in caught.value.problems)
    assert len(caught.value.problems) == 3
    skip = ["quantized", "sparse", "conj"]
    report = ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "run"), skip=skip)
    assert report.tensors == ("fine",)
    with pytest.raises(InvalidState, match="sparse"):
        ckpt.export(str(tmp_path / "m.pt"), str(tmp_path / "m.safetensors"))


def test_tied_weights_are_stored_once_and_have_all_names(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    net[1].weight = net[0].weight
    torch.save({"model": net.state_dict()}, tmp_path / "in.pt")
    ckpt.import_checkpoint(str(tmp_path / "in.pt"), str(tmp_path / "run"))
    with ckpt.open(str(tmp_path / "run")) as opened:
        assert dict(opened.aliases) == {"model.1.weight": "model.0.weight"}
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "out.pt"))
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    ckpt.export(str(tmp_path / "run"), str(tmp_path / "dcp"), format="dcp")
    wanted = {name: torch.zeros(5, 3) for name in ("0.weight", "1.weight")}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp")
    assert_same(wanted, dict(net.state_dict()))
    total = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    assert total < 2 * 5 * 3 * 4 + 1400  # one blob


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    return model, optimizer


def test_plain_optimizers_that_number_parameters_need_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "m.pt")
    source, root = str(tmp_path / "m.pt"), str(tmp_path / "run")
    with pytest.raises(InvalidState, match=r"optim\.param_groups: .*parameter_names="):
        ckpt.import_checkpoint(source, root)
    names = [name for name, _ in model.named_parameters()]
    ckpt.import_checkpoint(source, root, parameter_names=names, verify=True)
    new_model = fresh()
    new_optimizer = optimizer_of(new_model)
    ckpt.load({"model": new_model, "optim": new_optimizer}, root)
    assert_same(full_of(new_model, new_optimizer), full_of(model, optimizer))


def test_optimizers_that_tell_names_need_no_help(tmp_path: Path) -> None:
    model = fresh()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": named[:2], "lr": 0.5}, {"params": named[2:], "weight_decay": 0.25}], lr=0.125
    )
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "m.pt")
    ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    new_model = fresh()
    new_optimizer = optimizer_of(new_model)
    ckpt.load({"model": new_model, "optim": new_optimizer}, str(tmp_path / "run"))
    got, expected = full_of(new_model, new_optimizer), full_of(model, optimizer)
    for group in expected["optim"]["param_groups"]:
        del group["param_names"]
    assert_same(got, expected)


def test_full_optimizer_dicts_by_name_as_fsdp_gathers_them(tmp_path: Path) -> None:
    model, optimizer = trained()
    full = full_of(model, optimizer)
    torch.save(full, tmp_path / "m.pt")
    ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "run"))
    new_model = fresh()
    new_optimizer = optimizer_of(new_model)
    ckpt.load({"model": new_model, "optim": new_optimizer}, str(tmp_path / "run"))
    assert_same(full_of(new_model, new_optimizer), full)


def test_flattened_optimizers_as_torchtitan_saves_them(tmp_path: Path) -> None:
    """The model's names at the top, the optimizer flattened under one key."""
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_dict, optim = get_state_dict(model, optimizer, options=options)
    state = {**model_dict, "optimizer": optim, "train_state": {"step": 5}}
    dcp.save(state, checkpoint_id=tmp_path / "in")
    report = ckpt.import_checkpoint(
        str(tmp_path / "in"),
        str(tmp_path / "run"),
        rename=lambda name: name if name.startswith(("optimizer", "train")) else f"model.{name}",
    )
    assert report.modules == ("model",)
    new_model = fresh()
    new_optimizer = optimizer_of(new_model)
    state = {"model": new_model, "optimizer": new_optimizer, "train_state": {"step": 0}}
    ckpt.load(state, str(tmp_path / "run"))
    assert state["train_state"] == {"step": 5}
    assert_same(full_of(new_model, new_optimizer), full_of(model, optimizer))
    ckpt.export(str(tmp_path / "in"), str(tmp_path / "m.safetensors"))
    assert_same(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))


def test_two_directories_as_accelerate_saves_them(tmp_path: Path) -> None:
    model, optimizer = trained()
    model_dict, optim = get_state_dict(model, optimizer)
    dcp.save({"model": model_dict}, checkpoint_id=tmp_path / "in" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optim}, checkpoint_id=tmp_path / "in" / "optimizer_0")
    ckpt.import_checkpoint(str(tmp_path / "in"), str(tmp_path / "run"))
    new_model = fresh()
    new_optimizer = optimizer_of(new_model)
    ckpt.load({"model": new_model, "optimizer": new_optimizer}, str(tmp_path / "run"))
    assert_same(full_of(new_model, new_optimizer), full_of(model, optimizer))


def test_the_file_that_lightning_keeps_beside(tmp_path: Path) -> None:
    model, optimizer = trained()
    model_dict, optim = get_state_dict(model, optimizer)
    dcp.save({"model": model_dict, "optimizer_0": optim}, checkpoint_id=tmp_path / "in")
    rest = {"epoch": 2, "global_step": 40, "loops": {"fit": {"done": 3}}, "callbacks": {"x": {1}}}
    torch.save(rest, tmp_path / "in" / "meta.pt")
    with pytest.raises(InvalidState, match=r"callbacks\.x: "):
        ckpt.import_checkpoint(str(tmp_path / "in"), str(tmp_path / "run"))
    ckpt.import_checkpoint(str(tmp_path / "in"), str(tmp_path / "run"), skip=["callbacks"])
    new_model = fresh()
    new_optimizer = optimizer_of(new_model)
    state = {"model": new_model, "optimizer_0": new_optimizer, "epoch": 0, "loops": {}}
    ckpt.load(state, str(tmp_path / "run"))
    assert state["epoch"] == 2 and state["loops"] == {"fit": {"done": 3}}
    assert_same(full_of(new_model, new_optimizer), full_of(model, optimizer))


def test_names_that_wrappers_add_are_taken_off(tmp_path: Path) -> None:
    model, _ = trained()
    wrapped = {f"module._orig_mod.{name}": t for name, t in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "in.ckpt")
    ckpt.export(str(tmp_path / "in.ckpt"), str(tmp_path / "m.safetensors"))
    assert_same(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))


def test_shards_of_hugging_face_with_and_without_index(tmp_path: Path) -> None:
    model, _ = trained()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "m.pt")
    folder = tmp_path / "hf"
    ckpt.export(str(tmp_path / "m.pt"), str(folder / "model.safetensors"), shard_bytes_max=300)
    assert len(list(folder.iterdir())) > 3
    for url in (folder, folder / "model.safetensors.index.json", folder / "model.safetensors"):
        assert_same(opened(str(url)), state)
    (folder / "model.safetensors.index.json").unlink()
    assert_same(opened(str(folder)), state)


def test_shards_of_pytorch_bins(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {n: f"pytorch_model-0000{i}-of-00002.bin" for i, n in enumerate("ab", 1)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(opened(str(tmp_path)), {"a": torch.ones(2), "b": torch.zeros(3)})


def test_shards_of_dcps_hugging_face_writer(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2])}
    written_by = getattr(dcp, "HuggingFaceStorageWriter", None)
    if written_by is None:
        pytest.skip("this torch has no writer of Hugging Face's files")
    writer = written_by(str(tmp_path / "in"), save_distributed=True)
    dcp.save(dict(state), storage_writer=writer)
    assert_same(opened(str(tmp_path / "in")), state)


def test_names_are_chosen_by_globs_and_expressions_and_changed_by_rules(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({"model": model.state_dict()}, tmp_path / "m.pt")
    selection = dict(
        include=["re:weight$"],
        exclude=["last.*"],
        rename=["first=encoder.0", "re:second\\.(.*)=decoder.\\1", "=net"],
        dtype="bfloat16",
    )
    target = str(tmp_path / "m.safetensors")
    report = ckpt.export(str(tmp_path / "m.pt"), target, **selection, verify=True)
    assert report.tensors == ("net.decoder.weight", "net.encoder.0.weight")
    exported = load_file(target)
    assert torch.equal(exported["net.encoder.0.weight"], model.first.weight.bfloat16())
    with pytest.raises(CheckpointError, match="expected old=new"):
        bad = dict(rename=["nothing"])
        ckpt.export(str(tmp_path / "m.pt"), str(tmp_path / "n.safetensors"), **bad)


def test_renamed_models_keep_their_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(full_of(model, optimizer), tmp_path / "m.pt")
    rules = ["model=net", "re:\\bfirst\\.=primary.", "optim=opt"]
    ckpt.import_checkpoint(str(tmp_path / "m.pt"), str(tmp_path / "run"), rename=rules)
    with ckpt.open(str(tmp_path / "run")) as opened:
        names = {name for group in opened.values["opt.param_groups"] for name in group["params"]}
        assert "primary.weight" in names and "first.weight" not in names
        assert all(f"net.{name}" in opened for name in names)
        assert all(f"opt.state.{name}.exp_avg" in opened for name in names)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda p: torch.save({}, p / "m.pt", _use_new_zipfile_serialization=False),
            UnsupportedFormat,
            "1.6",
        ),
        (
            lambda p: (p / "m.pt").write_bytes(b"nothing of the kind"),
            Corrupt,
            "not a file of",
        ),
        (lambda p: (p / "m.pt").write_bytes(b""), Corrupt, "not a file of"),
        (
            lambda p: torch.jit.script(nn.Linear(1, 1)).save(p / "m.pt"),
            UnsupportedFormat,
            "TorchScript",
        ),
        (lambda p: None, NoCheckpoint, "is not there"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # of classes that differ by version
def test_other_files_are_refused_with_a_reason(
    tmp_path: Path, make: Any, error: type[Exception], words: str
) -> None:
    make(tmp_path)
    with pytest.raises(error, match=words):
        open_source(str(tmp_path / "m.pt"))


def test_metadata_that_tells_another_shape_than_the_file_is_refused(tmp_path: Path) -> None:
    """Two checkpoints whose files were mixed up: same names, same sizes, other dtypes."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a")
    dcp.save({"w": torch.ones(4, dtype=torch.int32)}, checkpoint_id=tmp_path / "b")
    data = (tmp_path / "b" / "__0_0.distcp").read_bytes()
    (tmp_path / "a" / "__0_0.distcp").write_bytes(data)
    with pytest.raises(Corrupt, match=r"w has int32 \(4,\) there, the metadata says float32"):
        open_source(str(tmp_path / "a"))


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "in")
    data = next((tmp_path / "in").glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[:-10])
    with pytest.raises(Corrupt, match=r"__0_0\.distcp has"):
        open_source(str(tmp_path / "in"))
    data.unlink()
    with pytest.raises(Corrupt, match=r"__0_0\.distcp is missing"):
        open_source(str(tmp_path / "in"))
    (tmp_path / "in" / ".metadata").unlink()
    with pytest.raises(NoCheckpoint, match="no checkpoint of a known format"):
        open_source(str(tmp_path / "in"), SourceOptions())


TOY = '''
"""Numbers in a file of text, one a line."""
import torch
from ckpt.convert.sources.opening import FolderSource, Format
from ckpt.convert.sources.source import Chunk, FileSource, SourceContents, SourceTensor
from ckpt.layout.region import Span


def open_folder(place):
    if "toy.raw" not in place.keys:
        return None
    nbytes = place.store.info("toy.raw").nbytes
    info = SourceTensor("w", "float32", (nbytes // 4,))
    contents = SourceContents({"w": info}, modules=("",))
    chunks = {"w": [Chunk(Span(0, nbytes // 4), "toy.raw", 0)]}
    return FolderSource(FileSource(place.store, "toy", contents, chunks, nbytes), ["toy.raw"])


FORMAT = Format(99, "a toy", open_folder)
'''


def test_a_format_is_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the folder of formats is enough to import, export and be named in errors."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "toy.py").write_text(TOY)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "more")])
    opening.formats.cache_clear()
    try:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "toy.raw").write_bytes(torch.arange(5.0).numpy().tobytes())
        ckpt.import_checkpoint(str(tmp_path / "in"), str(tmp_path / "run"), step=1, verify=True)
        state = {"w": torch.zeros(5)}
        ckpt.load(state, str(tmp_path / "run"))
        assert torch.equal(state["w"], torch.arange(5.0))
        (tmp_path / "nothing").mkdir()
        with pytest.raises(NoCheckpoint, match="a toy"):
            ckpt.export(str(tmp_path / "nothing"), str(tmp_path / "out.safetensors"))
    finally:
        opening.formats.cache_clear()
        sys.modules.pop("ckpt.convert.formats.toy", None)
