"""Hugging Face's `Trainer` with this library's checkpoints instead of its own.

    saves = TrainerCheckpoints("s3://bucket/run", save=ckpt.EverySteps(500) | ckpt.OnPreemption())
    trainer = Trainer(
        model, TrainingArguments(..., save_strategy="no"), train_dataset=data, callbacks=[saves]
    )
    trainer.train(resume_from_checkpoint=saves.resume_from(trainer))

Model, optimizer, scheduler, gradient scaler, the trainer's own state and every rank's random states
are saved in the background and come back bit for bit; the trainer itself skips the data that it has
seen. Models sharded by torch's FSDP stay sharded, and resume on another number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.loading.checkpoint import open_checkpoint
from ckpt.loading.contents import list_steps
from ckpt.rehearse.watch import place_of
from ckpt.saving.background import PendingSave
from ckpt.service.checkpointer import SAVE_DEFAULT, Checkpointer
from ckpt.service.policies import EverySteps, Observation, SavePolicy
from ckpt.service.publisher import publish
from ckpt.state.rng import RandomStates
from ckpt.state.types import PerRank
from storage.hidden import hides_secrets

_TRAINER_STATE_FILE = "trainer_state.json"  # as the trainer looks for it
_TRAINER = "trainer"


class TrainerCheckpoints(TrainerCallback):
    """A callback that saves when `save` says so, and restores what `resume_from` found.

    `options` are further arguments of `ckpt.Checkpointer`, `keep` among them. Let the trainer save
    nothing itself (`save_strategy="no"`). When the training raises, a save in flight is finished at
    the end of the process; use the callback in a `with` block to have that done at once.
    """

    @hides_secrets
    def __init__(self, url: str, *, save: SavePolicy = SAVE_DEFAULT, **options: Any) -> None:
        self.url, self._save = place_of(url), save
        self._options = options
        self._trainers: list[Trainer] = []
        self._resume_steps: list[int] = []
        self._open: list[Checkpointer] = []
        self._random: dict[str, Any] = {}
        self._drawn: dict[str, Any] = {}  # the random states after the newest event of a step
        self._is_due = self._is_epoch_over = False

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves, while the training runs. Raises CheckpointError at other times."""
        if not self._open:
            raise CheckpointError("there is a Checkpointer only while Trainer.train() runs")
        return self._open[0]

    def resume_from(self, trainer: Trainer, step: int | None = None) -> str | None:
        """What `trainer.train(resume_from_checkpoint=...)` needs to continue from `step`, or from
        the latest checkpoint; None when there is none yet.

        The path has the trainer's own state alone. `trainer` is set not to look for weights in it:
        they are restored, sharded as they are, when the training begins. Raises NoCheckpoint when
        `step` was not saved, CheckpointError when the checkpoint is not a Trainer's.
        """
        options = self._options.get("storage_options")
        try:
            steps = [info.step for info in list_steps(self.url, options)]
        except NoCheckpoint:
            steps = []
        if step is None and not steps:
            return None
        with open_checkpoint(self.url, step, options) as checkpoint:
            step = checkpoint.step
            stored = checkpoint.per_rank[0].get(_TRAINER) if checkpoint.per_rank else None
        if not isinstance(stored, dict) or "json" not in stored:
            raise CheckpointError(
                f"{self.url}, step {step}: has no state of a Trainer; it was not saved by "
                "TrainerCheckpoints. Load it with ckpt.load before training instead"
            )
        args = trainer.args
        # One for each rank: all write at the same time, and hosts may share the output folder.
        directory = Path(args.output_dir or ".") / "resume" / f"rank{args.process_index}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _TRAINER_STATE_FILE).write_text(stored["json"], encoding="utf-8")
        # Methods of the object: the trainer refuses directories without weights, and sets random
        # states where an epoch begins, or after it has skipped the data that was seen.
        vars(trainer)["_load_from_checkpoint"] = lambda *args, **kwargs: None
        vars(trainer)["_load_rng_state"] = lambda _: RandomStates().load_state_dict(self._random)
        self._trainers = [trainer]
        self._resume_steps = [step]
        return str(directory)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Open the checkpoints, and restore the step that `resume_from` has found."""
        self.close()
        self._is_due = False
        self._open = [
            Checkpointer(self._state(state, kwargs), self.url, save=self._save, **self._options)
        ]
        if not self._resume_steps:
            return
        step = self._resume_steps.pop()
        if step != state.global_step:
            raise CheckpointError(
                f"the trainer continues from step {state.global_step}, the checkpoint is of step "
                f"{step}: pass resume_from()'s answer to train(resume_from_checkpoint=...)"
            )
        self.checkpointer.restore(step)
        # Before its first step the trainer shuffles data, and draws random numbers for that: these
        # are put back when it asks for them.
        self._random = RandomStates().state_dict()

    # What belongs to a step comes after its end: logs, evaluations (one for each data set), then a
    # step of a scheduler that follows their metric, at the end of an epoch once more. So a step is
    # saved when the next one begins, with the random states of its last event. After the last step
    # the trainer may load the best weights: that one is saved before.

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Note the step, to be saved when it is over."""
        self._is_due, self._is_epoch_over = True, False
        self._drawn = RandomStates().state_dict()

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the last step, unless something is logged or evaluated."""
        self._is_epoch_over = True
        self._over(state, control, control.should_log or control.should_evaluate)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """The same, with the step in the history."""
        self._over(state, control, control.should_evaluate)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """The same, with the evaluation, and the random numbers that it has drawn."""
        self._over(state, control, False)

    def _over(self, state: TrainerState, control: TrainerControl, has_more: bool) -> None:
        self._drawn = RandomStates().state_dict()
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if is_last and self._is_epoch_over and not has_more:
            self._step(state)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the step before if it is time. Raises ckpt.Preempted when the job has to end."""
        self._step(state)

    on_epoch_begin = on_step_begin

    def _step(self, state: TrainerState) -> None:
        if self._is_due:
            self._is_due = False
            self.checkpointer.step(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Wait for the last save. Raises its error if it failed."""
        self._step(state)
        self.close()

    def close(self) -> None:
        """Wait for what is in flight and let signals be; the callback may be used again."""
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> TrainerCheckpoints:
        return self

    def __exit__(self, *raised: Any) -> None:
        while self._open:
            self._open.pop().__exit__(*raised)

    def _state(self, state: TrainerState, given: dict[str, Any]) -> dict[str, Any]:
        trainer = self._trainers[0] if self._trainers else None
        optimizer = given["optimizer"]
        saved = {
            "model": given["model"] if trainer is None else trainer.model_wrapped,
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": given["lr_scheduler"],
            _TRAINER: PerRank(_TrainerJson(state), _first),
            "rng": PerRank(_Drawn(self), _first),
        }
        scaler = getattr(getattr(trainer, "accelerator", None), "scaler", None)
        return saved if scaler is None else {**saved, "scaler": scaler}


class TrainerPublications(TrainerCallback):
    """A callback that publishes the model's weights every so many steps, as `ckpt.publish` does:
    for trainers of `transformers` and TRL whose rollouts are made by followers. `options` are its
    other arguments. A publication that fails ends the training at the next one.
    """

    @hides_secrets
    def __init__(self, url: str, *, every: int = 1, **options: Any) -> None:
        self._url, self._every, self._options = url, EverySteps(every), options
        self._pending: list[PendingSave] = []

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Publish if it is time, in the background."""
        if self._every.reasons(Observation(state.global_step, state.global_step - 1)):
            self._wait()
            step, options = state.global_step, self._options
            self._pending = [publish(kwargs["model"], self._url, step=step, **options)]

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Wait for the last publication. Raises its error if it failed."""
        self._wait()

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop().result()


class _Drawn(RandomStates):
    """The random states of a step whose events are over."""

    def __init__(self, callback: TrainerCheckpoints) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        return self._callback._drawn or super().state_dict()


class _TrainerJson:
    """The trainer's state as it writes it itself: progress, logs, states of its callbacks.

    Loading is the trainer's own work: it reads the file that `resume_from` makes.
    """

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, str]:
        return {"json": json.dumps(asdict(self._state), sort_keys=True)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Nothing: see the class."""


def _first(states: Sequence[Any], rank: int, world_size: int) -> Any:
    """On another number of ranks every rank gets what the first one had."""
    return states[0]


def conversions_of(model: Any, *, entry: str = "model") -> dict[str, Any]:
    """`stacks=` and `rename=` with which a state that has a live `model` of transformers as `entry`
    loads its published files, as transformers' own maps convert them:
    `ckpt.load({"model": model}, "mixtral/", **conversions_of(model))`.

    Call it before `model` is wrapped or sharded: torch changes its class then, and some maps are of
    a class. `rename` is None where names are alike. Raises CheckpointError for an operation that no
    rule has. Files that already have the live model's tensors, as transformers saves some, load
    without it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

    rules: dict[str, str] = {}
    renamings: list[Any] = []
    for one in get_model_conversion_mapping(model, add_legacy=False):
        if hasattr(one, "operations"):
            rules |= stacks_of(one, model)
        elif isinstance(one, WeightRenaming) and not isinstance(one, PrefixChange):
            renamings.insert(0, one.reverse_transform())
    path = f"{entry}." if entry else ""

    def rename(name: str) -> str:
        renamed: str = apply_renamings(name.removeprefix(path), renamings)
        return renamed

    return {"stacks": rules, "rename": rename if renamings else None}


def stacks_of(converter: Any, model: Any) -> dict[str, str]:
    """A converter of transformers as rules of `stacks=`, from what a live model has to what files
    have. An export takes them in the opposite order.
    """
    operations = {type(one).__name__: one for one in converter.operations}
    files, live = map(_form, converter.source_patterns), map(_form, converter.target_patterns)
    match list(operations), list(files), list(live):
        case ["MergeModulelist"], [file], [one]:
            return {one: file}
        case ["MergeModulelist", "Concatenate"] | ["Concatenate"], many, [one]:
            operation = operations["Concatenate"]
            if operation.num_shards_attribute:
                count = getattr(model.config.get_text_config(), operation.num_shards_attribute)
                many = [many[0].format(number) for number in range(count)]
            return {one: _joined(many, operation.dim)}
        case ["Chunk"], [file], many:
            return {_joined(many, operations["Chunk"].dim): file}
        case ["Split"], [file], many:
            dim = operations["Split"].dim
            sizes = [f"{name}:{_parameter(model, name).shape[dim]}" for name in many]
            return {_joined(sizes, dim): file}
        case ["Transpose"], [file], [one]:
            turn = operations["Transpose"]
            # It turns what has another shape than the model's, so never what is square there.
            if turn.check_dims and file == one:
                shape = _parameter(model, one).shape
                if shape[turn.dim0] == shape[turn.dim1]:
                    return {}
            return {one: f"{file}^T"}
        case ["Interleave", *_], [file], many:
            dim = operations["Interleave"].dim
            return {_joined(many, dim): f"{file}^I @{dim}"}
        case ["PermuteForRope"], [file], [one]:
            return {one: f"{file}^I{_heads(operations['PermuteForRope'], model)}"}
        case ["Chunk", "PermuteForRope"], [file], many:
            rope = operations["PermuteForRope"]
            turned = [one for one in many if any(name in one for name in rope.permute_layer_names)]
            parts = [f"{one}.pairs" if one in turned else one for one in many]
            rules = {_joined(parts, operations["Chunk"].dim): file}
            return rules | {one: f"{one}.pairs^I{_heads(rope, model)}" for one in turned}
        case ["ErnieFuseAndSplitTextVisionExperts"], many, [text, vision]:
            whole = f"{text}_and_{vision.replace('.', '_')}"  # a name in no model
            return {whole: _joined(many, 1), f"{text} + {vision}": whole}
    raise CheckpointError(f"{converter}: no rule of stacks= does {', '.join(operations)}")


def _form(pattern: str) -> str:
    """A name as our rules have it, from one of theirs."""
    return pattern.replace("\\.", ".").strip(".").replace("*", "{}")


def _joined(names: list[str], dim: int) -> str:
    return f"{' + '.join(names)} @{dim}" if len(names) > 1 else names[0]


def _heads(operation: Any, model: Any) -> int:
    config = getattr(model.config, operation.subconfig_key or "", model.config)
    return int(getattr(config, "num_attention_heads", 1))


def _parameter(model: Any, name: str) -> Any:
    for fqn, one in model.named_parameters():
        if f".{fqn}".endswith(f".{name}"):
            return one
    raise CheckpointError(
        f"the model has no parameter {name}, whose shape a rule needs; call conversions_of before "
        "the model is wrapped or sharded"
    )
