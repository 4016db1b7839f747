"""Hugging Face's Trainer, stopped and resumed with our checkpoints, ends with the same bits.

Method: a small Llama with dropout is trained by the real Trainer over several epochs of shuffled
data, once without a stop, and once stopped between two saves and resumed by a new Trainer.
"""

from __future__ import annotations

import contextlib
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


def tiny_llama(**more: Any) -> Any:
    """The configuration of a Llama of two layers and 50 words."""
    return transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        **more,
    )


def trainer_of(folder: Path, *callbacks: Any, **more: Any) -> Any:
    torch.manual_seed(7)
    config = tiny_llama(attention_dropout=0.3)
    tokens = torch.randint(0, 50, (20, 8), generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        save_strategy="no",
        per_device_train_batch_size=4,
        num_train_epochs=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **more,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    model = transformers.LlamaForCausalLM(config)
    how = {"train_dataset": data, "eval_dataset": data[:8], "callbacks": list(callbacks)}
    return transformers.Trainer(model, arguments, **how)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def logged(trainer: Any) -> list[tuple[int, float]]:
    """All losses, of steps and of evaluations."""
    logs = [log for log in trainer.state.log_history if "loss" in log or "eval_loss" in log]
    return [(log["step"], log.get("loss", log.get("eval_loss"))) for log in logs]


@pytest.mark.parametrize(
    ("every", "more"),
    [(3, {}), (5, {}), (3, {"eval_strategy": "steps", "eval_steps": 3}), (3, {"logging_steps": 4})],
    ids=["logged", "at the end of an epoch", "evaluated", "logged elsewhere"],
)
def test_a_stopped_training_ends_with_the_same_bits(
    every: int, more: dict[str, Any], tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    more = {"logging_steps": 1} | more
    whole = trainer_of(tmp_path / "whole", **more)
    whole.train()
    stopped = TrainerCheckpoints(url, save=ckpt.EverySteps(every))
    first = trainer_of(tmp_path / "first", stopped, Stop(8), **more)
    assert stopped.resume_from(first) is None
    with pytest.raises(RuntimeError, match="machine is gone"), stopped:
        first.train()
    assert [info.step for info in ckpt.list_steps(url)] == [*range(every, 8, every)]
    resumed = TrainerCheckpoints(url, save=ckpt.EverySteps(every), keep=ckpt.KeepLatest(2))
    second = trainer_of(tmp_path / "second", resumed, **more)
    second.train(resume_from_checkpoint=resumed.resume_from(second))
    assert second.state.global_step == whole.state.global_step == 15
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second).items())
    if more["logging_steps"] == 1:  # else the trainer averages over the steps since its start
        assert logged(second) == logged(whole)
    assert [info.step for info in ckpt.list_steps(url)] == [15 - every, 15]


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


@pytest.mark.parametrize("stop", [4, 5, 7])
def test_a_scheduler_that_follows_evaluations_resumes(stop: int, tmp_path: Path) -> None:
    """Its step, and the best metric, come after the evaluation of all data sets."""
    rates: dict[str, dict[int, float]] = {}
    best, history = {}, {}

    def train(root: str, name: str, stops_at: int, resumes: bool) -> None:
        class Rates(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                rate = given["optimizer"].param_groups[0]["lr"]
                rates.setdefault(name, {})[state.global_step] = rate
                if state.global_step == stops_at:
                    raise KeyboardInterrupt

        callback = TrainerCheckpoints(str(tmp_path / root), save=ckpt.EverySteps(1))
        trainer = plateau_trainer(tmp_path, [callback, Rates()])
        with contextlib.suppress(KeyboardInterrupt), callback:
            trainer.train(resume_from_checkpoint=callback.resume_from(trainer) if resumes else None)
        best[name] = trainer.state.best_metric
        history[name] = [
            {key: item for key, item in entry.items() if key.endswith("_loss") or key == "step"}
            for entry in trainer.state.log_history
            if "train_loss" not in entry
        ]

    train("whole", "whole", -1, False)
    train("cut", "first", stop, False)
    train("cut", "resumed", -1, True)
    assert min(rates["resumed"]) == stop
    assert rates["resumed"] == {s: r for s, r in rates["whole"].items() if s >= stop}
    assert len({*rates["whole"].values()}) > 2
    assert best["resumed"] == best["whole"] and history["resumed"] == history["whole"]


def plateau_trainer(folder: Path, callbacks: list[Any]) -> Any:
    """Two data sets are evaluated at each step; the rate falls where the second is not better."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.inner(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        some = torch.randn(count, 5, generator=generator)
        return [{"x": one[:4], "labels": one[4:]} for one in some]

    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        metric_for_best_model="a_loss",
        greater_is_better=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model=Model(),
        args=arguments,
        train_dataset=rows(20, 1),
        eval_dataset={"b": rows(8, 2), "a": rows(8, 3)},
        callbacks=callbacks,
    )


def test_a_subclass_of_publications_ends_once(tmp_path: Path) -> None:
    """What it does at the end of the training is not done at each step."""
    from ckpt.integrations.huggingface import TrainerPublications

    ended = []

    class Ending(TrainerPublications):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_train_end(args, state, control, **kwargs)
            ended.append(state.global_step)

    callback, model = Ending(str(tmp_path / "run")), torch.nn.Linear(2, 2)
    for step in (1, 2):
        state = transformers.TrainerState(global_step=step)
        callback.on_step_end(None, state, None, model=model)
    callback.on_train_end(None, state, None)
    assert ended == [2]
    published = ckpt.list_steps(tmp_path / "run" / "lines" / "published")
    assert {one.step for one in published} == {1, 2}
