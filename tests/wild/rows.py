"""What was tried, by group, and how each row came out, with this library and with torch's DCP."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests import ranks
from tests.ranks import RanksFailed, run_ranks
from tests.wild.crossing import cross, engines_to_cross
from tests.wild.engines import Writer, in_a_line
from tests.wild.frameworks import FRAMEWORKS, Framework, try_framework
from tests.wild.handing_on import Trainer, try_trainer
from tests.wild.lightnings import LIGHTNING
from tests.wild.models import PEFT_AND_DIFFUSERS, TRANSFORMERS, Model
from tests.wild.optimizers import (
    BITSANDBYTES,
    HEAVYBALL,
    OF_PYTORCH_OPTIMIZER,
    SCHEDULE_FREE,
    TORCH,
    Optimizer,
)
from tests.wild.rays import RAY
from tests.wild.relay import LOSS_ROUNDING, PATIENT, TENSOR_ROUNDING, adamw, relay
from tests.wild.resuming import Resumed, resume_all
from tests.wild.titan import TITAN
from tests.wild.vision import AVERAGES, VISION

BATCH = 24  # rows that share processes
WRITERS: tuple[Writer, ...] = ("ours", "DCP")
OF_VISION = ("torchvision", "timm")
LOOPS_OF_TIMM = "Training loops of timm"
SHARDED = ("ddp", "fsdp2", "our fully_shard", "our FSDP")


class Result(NamedTuple):
    """A line of the table. `ours` and `dcp` are empty for a pass, or say what fails and where.

    `remark` is what is no failure of either, such as engines under which an optimizer cannot step.
    """

    group: str
    package: str
    name: str
    what: str
    ours: str
    dcp: str
    remark: str = ""


class Group(NamedTuple):
    """Rows that are tried in the same way.

    `try_rows` gets the names that are wanted, none for all, and what is to write the checkpoints.
    """

    title: str
    needs: tuple[str, ...]
    try_rows: Callable[[Sequence[str], Sequence[Writer]], Iterator[Result]]


def missing_of(group: Group) -> str:
    """Why the libraries of a group cannot be imported here; empty when they can."""
    for name in group.needs:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name}: {in_a_line(error)}"
    return ""


def model_results(
    rows: Sequence[Model], title: str, names: Sequence[str], writers: Sequence[Writer]
) -> Iterator[Result]:
    rows = [row for row in rows if not names or row.name in names]
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        outcomes: dict[str, dict[str, str]] = {}
        for writer in writers:
            with tempfile.TemporaryDirectory() as folder:
                outcomes[writer] = relay(batch, writer, Path(folder))
        # Where engines round differently, bits are compared under each of them by itself.
        rounding = [as_optimizer(row) for row in batch if not row.is_exact]
        separately = {writer: under_all_engines(rounding, writer) for writer in writers}
        for row in batch:
            failed = {
                writer: outcomes[writer][row.name] or failures(separately[writer].get(row.name, ()))
                for writer in writers
            }
            remark = "" if row.is_exact else ROUNDING_REMARK
            yield Result(
                title,
                row.package,
                row.name,
                row.what,
                failed["ours"],
                failed.get("DCP", ""),
                remark,
            )


ROUNDING_REMARK = (
    f"engines round differently here: the relay is compared to {LOSS_ROUNDING:g} (losses) and "
    f"{TENSOR_ROUNDING:g} (tensors), bits under each engine by itself, as with optimizers"
)


def as_optimizer(row: Model) -> Optimizer:
    return Optimizer(row.name, row.package, adamw, row.build, row.loss)


def optimizer_results(
    rows: Sequence[Optimizer],
    title: str,
    names: Sequence[str],
    writers: Sequence[Writer],
) -> Iterator[Result]:
    rows = [row for row in rows if not names or row.name in names]
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        outcomes = {writer: under_all_engines(batch, writer) for writer in writers}
        crossed = {writer: across(batch, outcomes[writer], writer) for writer in writers}
        for row in batch:
            resumed = [outcomes.get(writer, {}).get(row.name, []) for writer in WRITERS]
            result = optimizer_result(row, title, *resumed)
            ours, dcp = (crossed.get(writer, {}).get(row.name, {}) for writer in WRITERS)
            yield with_crossings(result, ours, dcp)


def across(
    rows: Sequence[Optimizer], resumed: Mapping[str, Sequence[Resumed]], writer: Writer
) -> Mapping[str, Mapping[str, str]]:
    engines = {row.name: engines_to_cross(resumed[row.name]) for row in rows}
    going = [row for row in rows if engines[row.name]]
    with tempfile.TemporaryDirectory() as folder:
        return cross(going, engines, writer, Path(folder)) if going else {}


def with_crossings(result: Result, ours: Mapping[str, str], dcp: Mapping[str, str]) -> Result:
    """`result` with what failed between one process and two ranks. Where the steps of an optimizer
    depend on the layout, so may the shapes of its state: a remark.
    """
    failed = [
        "; ".join(each for each in (before, *unlike(crossed)) if each)
        for before, crossed in ((result.ours, ours), (result.dcp, dcp))
    ]
    marked = {name.rstrip("*"): why for name, why in ours.items() if name.endswith("*")}
    remarks = [result.remark] if result.remark else []
    if other := [name for name, why in marked.items() if not why]:
        remarks.append(
            f"steps depend on the layout ({', '.join(other)}): loads alone have all bits"
        )
    if stuck := [name for name, why in marked.items() if why]:
        remarks.append(
            f"steps and state depend on the layout, which it keeps ({', '.join(stuck)}): "
            f"{marked[stuck[0]]}"
        )
    return result._replace(ours=failed[0], dcp=failed[1], remark=". ".join(remarks))


def unlike(crossed: Mapping[str, str]) -> Iterator[str]:
    for engine, why in crossed.items():
        if why and not engine.endswith("*"):
            yield f"to {engine} and back: {why}"


def framework_results(
    rows: Sequence[Framework], title: str, names: Sequence[str], writers: Sequence[Writer]
) -> Iterator[Result]:
    for row in rows:
        if not names or row.name in names:
            outcomes = {writer: try_framework(row, writer) for writer in writers}
            ours, dcp = (outcomes.get(writer, "") for writer in WRITERS)
            yield Result(title, row.package, row.name, row.what, ours, dcp)


def trainer_results(
    rows: Sequence[Trainer], title: str, names: Sequence[str], writers: Sequence[Writer]
) -> Iterator[Result]:
    for row in rows:
        if not names or row.name in names:
            outcomes = {writer: try_trainer(row, writer) for writer in writers}
            ours, dcp = (outcomes.get(writer, "") for writer in WRITERS)
            yield Result(title, row.package, row.name, row.what, ours, dcp, row.remark)


def under_all_engines(rows: Sequence[Optimizer], writer: Writer) -> dict[str, list[Resumed]]:
    """Each row under every engine: in one process, and on two ranks."""
    outcomes: dict[str, list[Resumed]] = {row.name: [] for row in rows}
    # Torch's DCP knows nothing of the engines of this library.
    sharded = [name for name in SHARDED if writer == "ours" or not name.startswith("our")]
    if not rows:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        job = (resume_all, rows, ["plain"], writer, folder)
        (alone,) = run_ranks(1, *job, group=False, **PATIENT)
        for name, result in alone.items():
            outcomes[name] += result
        for name, result in on_two_ranks(rows, sharded, writer, folder).items():
            outcomes[name] += result
    return outcomes


def on_two_ranks(
    rows: Sequence[Optimizer], engines: Sequence[str], writer: Writer, folder: str
) -> dict[str, list[Resumed]]:
    """All rows share two processes; if that fails, each has its own, to see which it was."""
    try:
        return of_ranks(run_ranks(2, resume_all, rows, engines, writer, folder, **PATIENT))
    except RanksFailed as error:
        if len(rows) == 1:
            return {rows[0].name: [Resumed("2 ranks", failed=in_a_line(error))]}
    outcomes: dict[str, list[Resumed]] = {}
    for row in rows:
        with tempfile.TemporaryDirectory() as own:
            outcomes.update(on_two_ranks([row], engines, writer, own))
    return outcomes


def of_ranks(outcomes: Sequence[dict[str, list[Resumed]]]) -> dict[str, list[Resumed]]:
    """Of each row and engine, what the first rank has that something failed on, or rank 0."""
    return {
        name: [
            next((each for each in ranks if each.failed), ranks[0])
            for ranks in zip(*(one[name] for one in outcomes), strict=True)
        ]
        for name in outcomes[0]
    }


def optimizer_result(
    row: Optimizer, title: str, ours: Sequence[Resumed], dcp: Sequence[Resumed]
) -> Result:
    refused = [each for each in ours if each.refused]
    stepped = [each.engine for each in ours if not each.refused]
    remark = ""
    if refused:
        where = ", ".join(each.engine for each in refused)
        remark = f"cannot step here ({where}): {refused[0].refused}"
    what = ", ".join(stepped)
    return Result(title, row.package, row.name, what, failures(ours), failures(dcp), remark)


def failures(outcomes: Sequence[Resumed]) -> str:
    return "; ".join(f"{each.engine}: {each.failed}" for each in outcomes if each.failed)


def preload() -> None:
    """Have ranks forked from a process that has imported what each of them would import anew."""
    ranks.PRELOADED = (
        *ranks.PRELOADED,
        "tests.wild",
        "transformers.models.llama.modeling_llama",
        "tests.wild.rows",
    )


def groups() -> tuple[Group, ...]:
    """All groups, in the order of the page."""

    def models(title: str, rows: Sequence[Model], *needs: str) -> Group:
        return Group(title, needs, partial(model_results, rows, title))

    def optimizers(title: str, rows: Sequence[Optimizer], *needs: str) -> Group:
        return Group(title, needs, partial(optimizer_results, rows, title))

    def trainers(title: str, rows: Sequence[Trainer], *needs: str) -> Group:
        return Group(title, needs, partial(trainer_results, rows, title))

    return (
        models("Models of transformers", TRANSFORMERS, "transformers"),
        models("Adapters and diffusion", PEFT_AND_DIFFUSERS, "peft", "diffusers"),
        models("Models of torchvision and timm", VISION, *OF_VISION),
        Group(LOOPS_OF_TIMM, OF_VISION, partial(framework_results, AVERAGES, LOOPS_OF_TIMM)),
        Group(
            "Frameworks",
            ("transformers", "accelerate", "lightning", "torchdata.stateful_dataloader"),
            partial(framework_results, FRAMEWORKS, "Frameworks"),
        ),
        trainers("Trainer of Lightning", LIGHTNING, "lightning"),
        trainers("Trainer of torchtitan", TITAN, "torchtitan.trainer", "datasets"),
        trainers("Ray Train", RAY, "ray.train.torch"),
        optimizers("Optimizers of torch", TORCH),
        optimizers("Optimizers of schedulefree", SCHEDULE_FREE, "schedulefree"),
        optimizers("Optimizers of heavyball", HEAVYBALL, "heavyball"),
        optimizers("Optimizers of pytorch_optimizer", OF_PYTORCH_OPTIMIZER, "pytorch_optimizer"),
        optimizers("Optimizers of bitsandbytes", BITSANDBYTES, "bitsandbytes.optim"),
    )
