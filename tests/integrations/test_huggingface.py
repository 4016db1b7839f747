"""Hugging Face's Trainer, stopped and resumed with our checkpoints, ends with the same bits.

Method: a small Llama with dropout is trained by the real Trainer over several epochs of shuffled
data, once without a stop, and once stopped between two saves and resumed by a new Trainer.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ckpt.integrations.huggingface import TrainerCheckpoints

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers and accelerate


class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the machine is gone")


def trainer_of(folder: Path, *callbacks: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.3,
    )
    tokens = torch.randint(0, 50, (20, 8), generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        save_strategy="no",
        per_device_train_batch_size=4,
        num_train_epochs=3,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        use_cpu=True,
        seed=3,
    )
    return transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=list(callbacks),
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def losses(trainer: Any) -> list[float]:
    """From step 7 on; what was logged of the saved step itself came after the save."""
    return [log["loss"] for log in trainer.state.log_history if log.get("loss") and log["step"] > 6]


def test_a_stopped_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    stopped = TrainerCheckpoints(url, save=ckpt.EverySteps(3))
    first = trainer_of(tmp_path / "first", stopped, Stop(8))
    assert stopped.resume_from(first) is None
    with pytest.raises(RuntimeError, match="machine is gone"), stopped:
        first.train()
    assert [info.step for info in ckpt.list_steps(url)] == [3, 6]
    resumed = TrainerCheckpoints(url, save=ckpt.EverySteps(3), keep=ckpt.KeepLatest(2))
    second = trainer_of(tmp_path / "second", resumed)
    second.train(resume_from_checkpoint=resumed.resume_from(second))
    assert second.state.global_step == whole.state.global_step == 15
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second).items())
    assert losses(second) == losses(whole)
    assert [info.step for info in ckpt.list_steps(url)] == [12, 15]


def test_what_cannot_be_resumed_is_reported(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    ckpt.save({"model": torch.nn.Linear(2, 2)}, url, step=1)
    saves = TrainerCheckpoints(url)
    trainer = trainer_of(tmp_path / "out", saves)
    with pytest.raises(ckpt.CheckpointError, match="no state of a Trainer"):
        saves.resume_from(trainer)
    with pytest.raises(ckpt.NoCheckpoint, match="5"):
        saves.resume_from(trainer, step=5)
    with pytest.raises(ckpt.CheckpointError, match="while"):
        saves.checkpointer  # noqa: B018
