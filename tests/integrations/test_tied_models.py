"""Tied models of transformers keep one name of each tensor, the same in every format.

Reference: the live model's own tensors, the names that `save_pretrained` keeps, and what
`from_pretrained` of the class with the head and of the one without it opens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt
from tests.tools.test_model_folder import read_by_index

transformers = pytest.importorskip("transformers", reason="exports are opened by transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
WIDE = dict(HEADS, intermediate_size=32, pad_token_id=0)
GROUPED = dict(WIDE, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
NARROW = dict(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
T5 = dict(vocab_size=40, num_layers=1, num_heads=2, d_model=16, d_ff=32, d_kv=8)
BOTH = dict(
    vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, max_position_embeddings=16,
)  # fmt: skip
TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", NARROW),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", NARROW),
    "CTRLLMHeadModel": ("CTRLConfig", dict(NARROW, dff=32)),
    "OPTForCausalLM": ("OPTConfig", dict(WIDE, ffn_dim=32, word_embed_proj_dim=16)),
    "BloomForCausalLM": ("BloomConfig", dict(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GROUPED),
    "MambaForCausalLM": ("MambaConfig", dict(HEADS, state_size=4)),
    "XLNetLMHeadModel": ("XLNetConfig", dict(NARROW, d_model=16, d_inner=32)),
    "BertForMaskedLM": ("BertConfig", WIDE),
    "RobertaForMaskedLM": ("RobertaConfig", WIDE),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", WIDE),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        dict(vocab_size=40, dim=16, hidden_dim=32, n_heads=2),
    ),
    "ElectraForMaskedLM": ("ElectraConfig", dict(WIDE, embedding_size=16)),
    "AlbertForMaskedLM": ("AlbertConfig", dict(WIDE, embedding_size=16)),
    "MPNetForMaskedLM": ("MPNetConfig", WIDE),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", WIDE),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "MT5ForConditionalGeneration": ("MT5Config", dict(T5, tie_word_embeddings=True)),
    "BartForConditionalGeneration": ("BartConfig", BOTH),
    "MBartForConditionalGeneration": ("MBartConfig", BOTH),
    "PegasusForConditionalGeneration": ("PegasusConfig", BOTH),
    "M2M100ForConditionalGeneration": ("M2M100Config", BOTH),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        dict(BOTH, num_mel_bins=8, max_source_positions=16, max_target_positions=16),
    ),
}
HEAD_FIRST = "XLMRobertaForMaskedLM"  # its class registers the head before the base


def made(name: str, seed: int = 11) -> Any:
    """A model in which every parameter has elements of its own."""
    torch.manual_seed(seed)
    config, options = TIED[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def assert_opens(folder: Path, model: Any) -> None:
    """The class with the head and the one without it have the model's tensors, all of them."""
    live = model.state_dict()
    for kind in (type(model), transformers.AutoModel):
        opened, report = kind.from_pretrained(folder, output_loading_info=True)
        own = {}
        for key, tensor in opened.state_dict().items():
            known = next((n for n in (key, f"{model.base_model_prefix}.{key}") if n in live), None)
            if known is not None:
                assert torch.equal(tensor, live[known]), (kind.__name__, key)
                own[key] = known
        strangers = set(report["missing_keys"])  # poolers, which the head's class does not have
        assert strangers.isdisjoint(own) and all("pooler" in key for key in strangers)
        embedding = model.get_input_embeddings().weight
        assert torch.equal(opened.get_input_embeddings().weight, embedding)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TIED)
def test_every_path_keeps_the_name_of_the_base_model(name: str, tmp_path: Path) -> None:
    model = made(name)
    base, root, state = tmp_path / "base", tmp_path / "run", model.state_dict(keep_vars=True)
    model.save_pretrained(base)
    kept = load_file(base / "model.safetensors")
    every = {key: tensor.detach() for key, tensor in state.items()}
    assert kept.keys() == {
        next(key for key in kept if state[key] is tensor) for tensor in state.values()
    }
    assert len(kept) < len(every), "nothing is tied"
    ckpt.save({"model": model}, root, step=1)

    def assert_exports(source: Path, to: Path) -> None:
        """One file, several, and a model's folder have the same names and bytes."""
        ckpt.export(source, f"{to}/one/model.safetensors")
        ckpt.export(source, f"{to}/some/model.safetensors", shard_bytes_max=4000)
        ckpt.export(source, to / "hf", format="hf", config=base, shard_bytes_max=4000)
        for made in ("one", "some", "hf"):
            got = read_by_index(to / made)
            assert got.keys() == kept.keys(), (to.name, made)
            assert all(torch.equal(got[key], kept[key]) for key in kept), (to.name, made)

    first = tmp_path / "first"
    assert_exports(root, first)
    ckpt.export(root, str(first / "model.pt"))
    ckpt.export(root, first / "dcp", format="dcp")
    loaded = torch.load(first / "model.pt", weights_only=True)
    made(name).load_state_dict(loaded, strict=True)  # all names, and one storage for those tied
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == len(kept)
    torch.save(model.state_dict(), first / "torch.pt")
    sources = ["one/model.safetensors", "hf", "model.pt", "dcp"]
    if name != HEAD_FIRST:  # nothing in its state dict says so
        sources.append("torch.pt")
    for source in sources:
        imported = tmp_path / f"from {source.replace('/', ' ')}"
        ckpt.import_checkpoint(first / source, imported / "run")
        assert_exports(imported / "run", imported)
        with ckpt.open(imported / "run") as opened:
            assert set(opened) == every.keys(), "names were lost on the way"
    for folder in (first / "hf", first / "one"):
        (folder / "config.json").write_bytes((base / "config.json").read_bytes())
        assert_opens(folder, model)


def test_the_dcp_of_torch_keeps_both_names_and_opens(tmp_path: Path) -> None:
    """It has the bytes twice, and equal bytes alone do not show that two tensors are one."""
    model = made("GPT2LMHeadModel")
    model.save_pretrained(tmp_path / "base")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    ckpt.export(tmp_path / "dcp", tmp_path / "hf", format="hf", config=tmp_path / "base")
    assert read_by_index(tmp_path / "hf").keys() == model.state_dict().keys()
    assert_opens(tmp_path / "hf", model)
    ckpt.import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    for source in ("dcp", "run"):
        other = made("GPT2LMHeadModel", seed=5)
        ckpt.load(other, tmp_path / source)
        assert torch.equal(other.lm_head.weight, model.lm_head.weight)
