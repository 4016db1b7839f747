"""Exported model folders open in transformers bit for bit, with their tokenizers.

Reference: the models' own tensors, and the names that `save_pretrained` itself writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.tools.test_model_folder import read_by_index

transformers = pytest.importorskip("transformers", reason="exports are opened by transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(name: str) -> tuple[Any, Any]:
    """A model with random weights, and the class that opens its folder."""
    torch.manual_seed(11)
    wide = {**SMALL, "hidden_size": 16, "intermediate_size": 32}
    auto: Any = transformers.AutoModelForCausalLM
    if name == "llama":  # tied: the head's name is the first of the two in the alphabet
        config = transformers.LlamaConfig(**wide, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config), auto
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**wide)), auto
    if name == "bert":  # two pairs of tied names
        auto = transformers.AutoModelForMaskedLM
        return transformers.BertForMaskedLM(transformers.BertConfig(**wide)), auto
    config = transformers.T5Config(  # four names of one tensor
        vocab_size=40, num_layers=2, num_heads=2, d_model=16, d_ff=32, d_kv=8
    )
    auto = transformers.AutoModelForSeq2SeqLM
    return transformers.T5ForConditionalGeneration(config), auto


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer stands beside the model")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "t5"])
def test_from_pretrained_opens_an_exported_folder(tmp_path: Path, name: str) -> None:
    model, auto = tiny(name)
    base, target = tmp_path / "base", tmp_path / "served"
    model.save_pretrained(base)
    tokenizer().save_pretrained(base)
    root = str(tmp_path / "run")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)  # what was trained is not what the base has
    ckpt.save({"model": model}, root, step=1)
    ckpt.export(root, target, format="hf", config=base, shard_bytes_max=6000)

    read = read_by_index(target)
    assert read.keys() == read_by_index(base).keys(), "other names than save_pretrained writes"
    opened, report = auto.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    expected, got = model.state_dict(), opened.state_dict()
    assert expected.keys() == got.keys()
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key
    encoded = transformers.AutoTokenizer.from_pretrained(target)("to be or not to be")
    assert encoded["input_ids"] == [1, 2, 3, 4, 1, 2]
