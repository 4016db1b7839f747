"""Models of torchvision and of timm, which are made of it: BatchNorm, channels last, averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.wild.engines import Writer
from tests.wild.frameworks import Framework, Parts, check_loop
from tests.wild.models import Model, floats_of, tokens_of

CLASSES = 5
SIDE = 32  # pixels


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return floats_of(step, 3, SIDE, SIDE), tokens_of(step, 1)[:, 0] % CLASSES


def classes(model: nn.Module, step: int) -> torch.Tensor:
    images, labels = batch_of(step)
    return nn.functional.cross_entropy(model(images), labels)


def classes_of_channels_last(model: nn.Module, step: int) -> torch.Tensor:
    images, labels = batch_of(step)
    return nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)


def in_blocks(model: Any, *blocks: str) -> nn.Module:
    """`model`, whose blocks engines keep whole; these libraries do not name them."""
    model._no_split_modules = blocks
    made: nn.Module = model.train()
    return made


# --- torchvision ---------------------------------------------------------------------------------


def resnet() -> nn.Module:
    from torchvision.models import resnet

    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    return in_blocks(model, "BasicBlock")


def mobilenet() -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    return in_blocks(mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5), "InvertedResidual")


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=SIDE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32,
        num_classes=CLASSES, dropout=0.1,
    )  # fmt: skip
    return in_blocks(model, "EncoderBlock")


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        patch_size=[4, 4], embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4],
        num_classes=CLASSES, stochastic_depth_prob=0.0,
    )  # fmt: skip
    return in_blocks(model, "SwinTransformerBlock")


def opened_by(build: Callable[[], nn.Module], model: nn.Module, folder: str) -> nn.Module:
    """torchvision opens no files: its models take a dict."""
    from safetensors.torch import load_file

    opened = build()
    opened.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=True)
    return opened


def of_torchvision(
    name: str,
    what: str,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor] = classes,
) -> Model:
    return Model(name, "torchvision", what, build, loss, partial(opened_by, build))


# --- timm ----------------------------------------------------------------------------------------


def created(name: str, options: dict[str, Any], *blocks: str) -> nn.Module:
    import timm

    return in_blocks(timm.create_model(name, num_classes=CLASSES, **options), *blocks)


def checkpoint_opened(build: Callable[[], nn.Module], model: nn.Module, folder: str) -> nn.Module:
    from timm.models import load_checkpoint

    opened = build()
    load_checkpoint(opened, f"{folder}/model.safetensors", strict=True)
    return opened


def of_timm(name: str, what: str, options: dict[str, Any], *blocks: str) -> Model:
    build = partial(created, name, options, *blocks)
    return Model(f"timm {name}", "timm", what, build, classes, partial(checkpoint_opened, build))


VISION = (
    of_torchvision("ResNet", "BatchNorm", resnet),
    of_torchvision("MobileNetV3", "BatchNorm, grouped convolutions", mobilenet),
    of_torchvision("VisionTransformer", "attention, dropout", vision_transformer),
    of_torchvision("SwinTransformer", "windows, buffers of indexes", swin),
    # Models that the library tests itself with.
    of_timm("test_resnet", "BatchNorm", {}, "BasicBlock", "Bottleneck"),
    of_timm("test_efficientnet", "BatchNorm, grouped convolutions", {}, "InvertedResidual"),
    of_timm("test_convnext", "convolutions", {}, "ConvNeXtBlock"),
    of_timm("test_vit", "attention", dict(img_size=SIDE), "Block"),
)


# --- averages ------------------------------------------------------------------------------------


def averaged_loop(writer: Writer, root: str) -> None:
    """timm's average of a model with BatchNorm, channels last, and its own optimizer and
    scheduler.
    """
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    def make(seed: int) -> Parts:
        torch.manual_seed(seed)
        model: nn.Module = created("test_resnet", {}, "BasicBlock")
        model = model.to(memory_format=torch.channels_last)
        average = ModelEmaV3(model, decay=0.8)
        optimizer: Any = create_optimizer_v2(model, opt="lamb", lr=0.01, weight_decay=0.1)
        schedule = CosineLRScheduler(optimizer, t_initial=8, warmup_t=2)
        if torch.distributed.is_initialized():
            model = DistributedDataParallel(model)
        return Parts(model, optimizer, {"average": average, "schedule": schedule})

    def train(parts: Parts, steps: range) -> Iterator[float]:
        for step in steps:
            torch.manual_seed(step)
            parts.optimizer.zero_grad()
            loss = classes_of_channels_last(parts.model, step)
            loss.backward()
            parts.optimizer.step()
            parts.others["average"].update(getattr(parts.model, "module", parts.model), step=step)
            parts.others["schedule"].step(step)
            yield float(loss.detach())

    check_loop(make, train, writer, root)


AVERAGES = (
    Framework(
        "ModelEmaV3", "timm", "timm's EMA, Lamb and scheduler, channels last", 1, averaged_loop
    ),
    Framework("ModelEmaV3, DDP", "timm", "the same on 2 ranks", 2, averaged_loop),
)
