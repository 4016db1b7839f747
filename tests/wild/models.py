"""Models of other libraries, tiny and with random weights, and a loss for each step of a training.

Nothing is downloaded: every model is made from a configuration. A batch depends on the step alone,
so that all ranks train on the same one and a mean of gradients over 2 or 4 ranks changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

VOCABULARY = 48
TOKENS = 8
SAMPLES = 2


class Model(NamedTuple):
    """A row of the table. `build` needs `package`; `loss` gets the model as an engine wraps it.

    Where not `is_exact`, the bits of a step under one engine are not quite those under another.

    `open` loads what `export` wrote beside the model's configuration with the library's own
    function, where there is one.
    """

    name: str
    package: str
    what: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    open: Callable[[nn.Module, str], Any] | None = None
    is_exact: bool = True


def generator_of(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens_of(step: int, count: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, count), generator=generator_of(step))


def floats_of(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=generator_of(step))


# --- transformers --------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
GROUPED = dict(SMALL, num_key_value_heads=2, head_dim=4)
IMAGES = dict(SMALL, image_size=16, patch_size=4, num_labels=5)
EXPERTS = dict(GROUPED, num_experts=4, num_local_experts=4, num_experts_per_tok=2)
OWN_NAMES = dict(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=64)
LAYERS = dict(
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
)
SPEECH = dict(
    SMALL,
    conv_dim=(8, 8),
    conv_kernel=(4, 3),
    conv_stride=(4, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    # No masks, which are drawn from numpy's generator, and no layers left out: under FSDP the
    # library runs all of them.
    mask_time_prob=0.0,
    mask_feature_prob=0.0,
    layerdrop=0.0,
)


def language(model: nn.Module, step: int) -> torch.Tensor:
    tokens = tokens_of(step)
    return loss_of(model(input_ids=tokens, labels=tokens))


def images(model: nn.Module, step: int) -> torch.Tensor:
    labels = tokens_of(step, 1)[:, 0] % 5
    return loss_of(model(pixel_values=floats_of(step, 3, 16, 16), labels=labels))


def images_large(model: nn.Module, step: int) -> torch.Tensor:
    labels = tokens_of(step, 1)[:, 0] % 5
    return loss_of(model(pixel_values=floats_of(step, 3, 32, 32), labels=labels))


def speech(model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model(input_values=floats_of(step, 400), labels=tokens_of(step, 4)))


def spectra(model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model(input_features=floats_of(step, 8, 32), labels=tokens_of(step)))


def pairs(model: nn.Module, step: int) -> torch.Tensor:
    inputs = dict(input_ids=tokens_of(step), pixel_values=floats_of(step, 3, 16, 16))
    return loss_of(model(**inputs, return_loss=True))


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def transformer(
    name: str,
    what: str,
    config: str,
    options: dict[str, Any],
    loss: Callable[[nn.Module, int], torch.Tensor] = language,
) -> Model:
    """A row of transformers: the class `name`, made of the configuration class `config`."""

    return Model(
        name, "transformers", what, partial(made_of, name, config, options), loss, from_pretrained
    )


def made_of(name: str, config: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return made.train()


def from_pretrained(model: Any, folder: str) -> Any:
    """The model of `folder` as its class opens it. Raises when a name is missing or too many."""
    kind, config = type(model), model.config
    config.save_pretrained(folder)
    opened, outcomes = kind.from_pretrained(folder, output_loading_info=True)
    if outcomes["missing_keys"] or outcomes["unexpected_keys"] or outcomes["mismatched_keys"]:
        raise AssertionError(f"from_pretrained: {outcomes}")
    return opened


TRANSFORMERS = (
    transformer("LlamaForCausalLM", "dense", "LlamaConfig", GROUPED),
    transformer(
        "Qwen3ForCausalLM", "dense, tied", "Qwen3Config", dict(GROUPED, tie_word_embeddings=True)
    ),
    transformer("Gemma3ForCausalLM", "dense, tied", "Gemma3TextConfig", GROUPED),
    transformer(
        "GPT2LMHeadModel",
        "dense, tied, weights of the other order",
        "GPT2Config",
        dict(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64),
    ),
    transformer("GPTNeoXForCausalLM", "dense", "GPTNeoXConfig", SMALL),
    transformer(
        "BloomForCausalLM",
        "dense, tied",
        "BloomConfig",
        dict(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4),
    ),
    transformer("Phi3ForCausalLM", "dense", "Phi3Config", dict(GROUPED, pad_token_id=0)),
    transformer("BertForMaskedLM", "encoder, tied with a bias", "BertConfig", SMALL),
    transformer("DebertaV2ForMaskedLM", "encoder", "DebertaV2Config", SMALL),
    transformer("AlbertForMaskedLM", "encoder, layers shared", "AlbertConfig", SMALL),
    transformer(
        "T5ForConditionalGeneration",
        "encoder and decoder, tied",
        "T5Config",
        dict(
            vocab_size=VOCABULARY, d_model=16, d_ff=32, d_kv=4, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        ),
    )._replace(is_exact=False),
    transformer(
        "BartForConditionalGeneration",
        "encoder and decoder, tied",
        "BartConfig",
        dict(OWN_NAMES, **LAYERS),
    )._replace(is_exact=False),
    transformer("MixtralForCausalLM", "mixture of experts", "MixtralConfig", EXPERTS),
    transformer(
        "Qwen3MoeForCausalLM",
        "mixture of experts",
        "Qwen3MoeConfig",
        dict(EXPERTS, moe_intermediate_size=16),
    ),
    transformer(
        "DeepseekV3ForCausalLM",
        "mixture of experts, latent attention",
        "DeepseekV3Config",
        dict(
            SMALL, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
            topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, num_key_value_heads=4,
        ),
    ),
    transformer(
        "MambaForCausalLM",
        "state space, tied",
        "MambaConfig",
        dict(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2),
    ),
    transformer("ViTForImageClassification", "vision", "ViTConfig", IMAGES, images),
    transformer(
        "ConvNextForImageClassification",
        "vision, convolutions",
        "ConvNextConfig",
        dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5),
        images_large,
    ),
    transformer(
        "ResNetForImageClassification",
        "vision, BatchNorm",
        "ResNetConfig",
        dict(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
        ),
        images_large,
    ),
    transformer(
        "SwinForImageClassification",
        "vision, buffers of indexes",
        "SwinConfig",
        dict(
            image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2],
            window_size=2, num_labels=5,
        ),
        images,
    ),
    transformer(
        "WhisperForConditionalGeneration",
        "speech, encoder and decoder, tied",
        "WhisperConfig",
        dict(
            OWN_NAMES, **LAYERS, num_mel_bins=8, max_source_positions=16, max_target_positions=16,
            decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
        spectra,
    )._replace(is_exact=False),
    transformer(
        "Wav2Vec2ForCTC", "speech, weight norm", "Wav2Vec2Config", SPEECH, speech
    ),
    transformer(
        "CLIPModel",
        "vision and text",
        "CLIPConfig",
        dict(text_config=dict(SMALL, eos_token_id=2), vision_config=IMAGES, projection_dim=16),
        pairs,
    ),
)  # fmt: skip


# --- peft, diffusers -----------------------------------------------------------------------------


def lora() -> nn.Module:
    """A Llama that is frozen, with trained adapters in it."""
    import peft

    base: Any = made_of("LlamaForCausalLM", "LlamaConfig", GROUPED)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False
    )
    made: Any = peft.get_peft_model(base, config)
    return nn.Module.train(made)


def adapters_from_pretrained(model: nn.Module, folder: str) -> Any:
    """The adapters of `folder`, on the same frozen weights. What is exported are all weights."""
    import peft
    from safetensors.torch import load_file, save_file

    exported = load_file(f"{folder}/model.safetensors")
    lora_only = {name.replace(".default", ""): x for name, x in exported.items() if "lora_" in name}
    save_file(lora_only, f"{folder}/adapter_model.safetensors")
    made: Any = model
    made.peft_config["default"].save_pretrained(folder)
    base: Any = made_of("LlamaForCausalLM", "LlamaConfig", GROUPED)
    frozen = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): x
        for name, x in exported.items()
        if "lora_" not in name
    }
    base.load_state_dict(frozen, strict=True)
    return peft.PeftModel.from_pretrained(base, folder)


def unet() -> nn.Module:
    import diffusers

    made: Any = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return nn.Module.train(made)


def noise(model: nn.Module, step: int) -> torch.Tensor:
    images = floats_of(step, 3, 8, 8)
    loss: torch.Tensor = (model(images, step).sample - images).square().mean()
    return loss


def unet_from_pretrained(model: nn.Module, folder: str) -> Any:
    made: Any = model
    made.save_config(folder)
    Path(folder, "model.safetensors").rename(Path(folder, "diffusion_pytorch_model.safetensors"))
    opened, outcomes = type(made).from_pretrained(folder, output_loading_info=True)
    if outcomes["missing_keys"] or outcomes["unexpected_keys"]:
        raise AssertionError(f"from_pretrained: {outcomes}")
    return opened


PEFT_AND_DIFFUSERS = (
    Model(
        "LoRA on Llama",
        "peft",
        "frozen weights, adapters",
        lora,
        language,
        adapters_from_pretrained,
    ),
    Model("UNet2DModel", "diffusers", "diffusion", unet, noise, unet_from_pretrained),
)
