"""What a seed stands for: a model, how it is wrapped and trained, and calls in some order.

A `Draw` is a value without tensors: it prints in a few lines, and the same seed gives the same
draw on every rank.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

# A model is a Part or a tuple of models, which run one after the other.
Tree = Any
STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
DTYPES = ("float32",) * 5 + ("float64",) * 3 + ("bfloat16",)
EXTRAS = ("offload", "sync", "hook", "meta", "states")
"""CPU offload, `sync_module_states` over unequal ranks, a user's own reduction, initialisation from
the meta device, ignored parameters instead of an ignored module."""
KINDS = ("linear", "linear", "mlp", "mlp", "tied", "scaled", "norm", "batch", "half", "conv")


@dataclass(frozen=True)
class Part:
    """A module of `tests.differential.models`; `frozen` is "", "all" or "first"."""

    kind: str
    size: int
    frozen: str = ""


@dataclass(frozen=True)
class Op:
    """A call; `args` are those of the method `do_NAME` of a side."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.args.items())})"


@dataclass(frozen=True)
class Draw:
    """Everything that a seed decides."""

    seed: int
    face: str
    """"flat" (FullyShardedDataParallel) or "fully" (fully_shard)."""
    world: int
    tree: Tree
    dtype: str
    group: str
    """"world", "sub" (two models side by side), "pair", "mesh", "mesh2" (both 2x2), or "tensor"
    (2x2 too, with tensor-parallel members along its second axis)."""
    strategy: str
    reshard: Any
    wrapping: Any
    """Paths of the inner units, or ("policy", name)."""
    ignored: str | None
    orig: bool
    precision: str
    optimizer: str
    param_groups: int
    prefetch: bool
    extra: str
    """One of `EXTRAS`, or ""."""
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.face} on {self.world} ranks, group {self.group}, "
            f"{self.strategy if self.face == 'flat' else f'reshard={self.reshard}'}, "
            f"wrapping {self.wrapping}, orig={self.orig}, {self.dtype}, "
            f"precision {self.precision}, ignored {self.ignored}, {self.optimizer} with "
            f"{self.param_groups} group(s), extra {self.extra!r}\n  model {self.tree}"
        )
        return "\n  ".join([head, *(f"{index}: {op}" for index, op in enumerate(self.ops))])


def drawn(seed: int, world: int) -> Draw:
    """The draw of this seed for a job of `world` ranks (2 or 4)."""
    rng = random.Random(f"{seed}:{world}")
    face = "flat" if rng.random() < 0.7 else "fully"
    may_freeze = rng.random() < 0.3
    tree = _tree(rng, may_freeze=may_freeze)
    groups = {"flat": ("world", "world", "mesh"), "fully": ("world", "mesh")}[face]
    if world == 4:
        groups += ("sub", "mesh2", "pair", "tensor") if face == "flat" else ("mesh2", "tensor")
    group = rng.choice(groups)
    strategy = rng.choice(STRATEGIES)
    if group in ("pair", "mesh2"):
        strategy = rng.choice(("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"))
    draw = Draw(
        seed=seed,
        face=face,
        world=world,
        tree=tree,
        dtype=rng.choice(DTYPES),
        group=group,
        strategy=strategy,
        reshard=rng.choice((None, True, False, *((2,) if world == 4 else ()))),
        wrapping=_wrapping(rng, tree, face),
        ignored=rng.choice(_paths(tree)) if rng.random() < 0.15 else None,
        # Units of flat parameters refuse members of both kinds: not every such draw may end there.
        orig=rng.random() < (0.9 if may_freeze else 0.5),
        precision=rng.choice(("none",) * 4 + ("bf16", "bf16/f32", "reduce", "buffers", "keep")),
        optimizer=rng.choice(("sgd", "adam", "adamw", "foreach", "adagrad", "rmsprop")),
        param_groups=rng.choice((1, 1, 2)),
        prefetch=rng.random() < 0.3,
        extra=rng.choice(EXTRAS) if rng.random() < 0.3 else "",
        ops=_ops(rng, face),
    )
    if group == "tensor":
        draw = dataclasses.replace(draw, tree=_even(tree), ignored=None, extra="")
    if draw.extra == "hook" and (group in ("pair", "mesh2") or draw.precision != "none"):
        draw = dataclasses.replace(draw, extra="")  # not offered, or torch's own business
    if draw.extra == "meta" and ("'tied'" in str(tree) or draw.ignored is not None):
        # to_empty() cuts ties; what is ignored stays on the meta device.
        draw = dataclasses.replace(draw, extra="")
    if draw.precision == "keep" and face == "flat":
        # Others refuse gradients of another dtype than their state.
        draw = dataclasses.replace(draw, optimizer="sgd")
    return draw


def _tree(rng: random.Random, *, may_freeze: bool, depth: int = 0) -> Tree:
    def part() -> Part:
        frozen = rng.choice(("", "", "all", "first")) if may_freeze else ""
        return Part(rng.choice(KINDS), rng.choice((1, 2, 3, 5, 7)), frozen)

    children: list[Tree] = []
    for _ in range(rng.randint(2, 3)):
        nests = depth < 2 and rng.random() < 0.35
        nested = _tree(rng, may_freeze=may_freeze, depth=depth + 1) if nests else part()
        children.append(nested)
    return tuple(children)


def _even(tree: Tree) -> Tree:
    """With sizes that two ranks can share evenly."""
    if isinstance(tree, Part):
        return dataclasses.replace(tree, size=2 * tree.size) if tree.kind == "mlp" else tree
    return tuple(_even(child) for child in tree)


def paths_of(tree: Tree, kind: str, prefix: str = "") -> list[str]:
    """Dotted paths of all parts of a kind."""
    if isinstance(tree, Part):
        return [prefix] if tree.kind == kind else []
    dot = f"{prefix}." if prefix else ""
    return [path for index, one in enumerate(tree) for path in paths_of(one, kind, f"{dot}{index}")]


def _paths(tree: Tree, prefix: str = "") -> list[str]:
    """Dotted paths of everything below the model, outer ones first."""
    if isinstance(tree, Part):
        return []
    paths = []
    for index, child in enumerate(tree):
        paths += [f"{prefix}{index}", *_paths(child, f"{prefix}{index}.")]
    return paths


def _wrapping(rng: random.Random, tree: Tree, face: str) -> Any:
    paths = _paths(tree)
    if face == "flat" and rng.random() < 0.35:
        return ("policy", rng.choice(("linear", "sequential", "mlp", "size", "always", "custom")))
    return tuple(path for path in paths if rng.random() < 0.35)


# Calls -------------------------------------------------------------------------------------------

FORMS = ("FULL", "FULL", "SHARDED", "SHARDED", "LOCAL")


def _ops(rng: random.Random, face: str) -> tuple[Op, ...]:
    makers = _FLAT if face == "flat" else _FULLY
    weights = [weight for weight, _ in makers]
    chosen = [
        rng.choices([make for _, make in makers], weights)[0](rng) for _ in range(rng.randint(3, 9))
    ]
    # Most draws begin with a step: much of what can differ needs state.
    if face == "flat" and rng.random() < 0.05:
        chosen = [_convert(rng), *chosen]
    elif rng.random() < 0.8:
        chosen = [Op("train", {"steps": rng.randint(1, 2)}), *chosen]
    return (*chosen, Op("train", {"steps": 1}), Op("full"))


def _train(rng: random.Random) -> Op:
    return Op("train", {"steps": rng.randint(1, 2)})


def _backward(rng: random.Random) -> Op:
    return Op("backward", {"sync": rng.random() < 0.6, "forwards": rng.choice((1, 1, 2))})


def _step(rng: random.Random) -> Op:
    return Op("step")


def _zero(rng: random.Random) -> Op:
    return Op("zero", {"to_none": rng.random() < 0.7, "of": rng.choice(("model", "optimizer"))})


def _clip(rng: random.Random) -> Op:
    norm = rng.choice((1.0, 2.0, 2, float("inf"), "inf", 3.0))
    return Op("clip", {"max_norm": rng.choice((0.1, 10.0, 1)), "norm": norm})


def _evaluate(rng: random.Random) -> Op:
    return Op("evaluate", {"train": rng.random() < 0.3})


def _summon(rng: random.Random) -> Op:
    return Op(
        "summon",
        {
            "writeback": rng.random() < 0.6,
            "recurse": rng.random() < 0.8,
            "rank0_only": rng.random() < 0.2,
            "offload_to_cpu": rng.random() < 0.1,
            "with_grads": rng.random() < 0.2,
            "change": rng.random() < 0.6,
            "inner": rng.random() < 0.15,
        },
    )


def _config(rng: random.Random) -> dict[str, Any]:
    return {
        "form": rng.choice(FORMS),
        "offload": rng.random() < 0.15,
        "rank0": rng.random() < 0.15,
        "config": rng.random() < 0.6,
    }


def _state(rng: random.Random) -> Op:
    return Op("state", {**_config(rng), "prefix": rng.choice(("", "", "", "a."))})


def _load(rng: random.Random) -> Op:
    # A dict of the first rank only is for other readers: all ranks need all of it here.
    return Op(
        "load",
        {
            **_config(rng),
            "rank0": False,
            "strict": rng.random() < 0.6,
            "change": rng.choice(("", "", "", "drop", "add", "shape", "drop_all", "plus")),
        },
    )


def _comparable(rng: random.Random) -> dict[str, bool]:
    """Mostly settings under which torch's full optimizer dicts are right on the CPU."""
    return {"config": True, "offload": False} if rng.random() < 0.8 else {}


def _optim_state(rng: random.Random) -> Op:
    given = rng.choice((None, None, "own"))
    return Op("optim_state", {**_config(rng), **_comparable(rng), "given": given})


def _optim_load(rng: random.Random) -> Op:
    how = rng.choice(("directly", "directly", "", "", "", "named"))
    return Op(
        "optim_load",
        {
            **_config(rng),
            **_comparable(rng),
            "directly": how == "directly",
            "named": how == "named",
            "change": rng.choice(("", "", "", "drop_first", "drop_last", "groups", "scale")),
        },
    )


def _legacy(rng: random.Random) -> Op:
    return Op("legacy", {"kind": rng.choice(("full", "sharded", "scatter", "flatten", "shard"))})


def _rekey(rng: random.Random) -> Op:
    return Op("rekey", {"to": rng.choice(("name", "id", "id")), "rank0": False})


def _set_type(rng: random.Random) -> Op:
    return Op("set_type", {**_config(rng), "wrong": rng.random() < 0.1})


def _apply(rng: random.Random) -> Op:
    return Op("apply", {"inner": rng.random() < 0.2})


def _names(rng: random.Random) -> Op:
    return Op("names", {"summoned": rng.random() < 0.3})


def _plain(name: str) -> Any:
    return lambda rng: Op(name)


def _convert(rng: random.Random) -> Op:
    """Before everything else: later conversions are refused by torch's classes."""
    return Op("convert", {"to": rng.choice(("float64", "bfloat16", "float32"))})


_FLAT = [
    (6, _train),
    (5, _backward),
    (3, _step),
    (2, _zero),
    (3, _clip),
    (2, _evaluate),
    (4, _summon),
    (4, _state),
    (5, _load),
    (3, _optim_state),
    (4, _optim_load),
    (1, _legacy),
    (1, _rekey),
    (2, _set_type),
    (1, _apply),
    (2, _names),
    (1, _plain("write_params")),
    (1, _plain("write_grads")),
    (1, _plain("look")),
]


def _flag(name: str) -> Any:
    return lambda rng: Op(name, {"on": rng.random() < 0.5, "recurse": rng.random() < 0.7})


def _clip_of_torch(rng: random.Random) -> Op:
    """No maximum: the function is torch's on both sides, and fails on ranks with empty shards."""
    return Op("clip", {"max_norm": rng.choice((0.1, 10.0, 1)), "norm": rng.choice((1.0, 2.0, 3.0))})


_FULLY = [
    (6, _train),
    (5, _backward),
    (3, _step),
    (2, _zero),
    (3, _clip_of_torch),
    (2, _evaluate),
    (3, _plain("module_state")),
    (3, lambda rng: Op("module_load", {"change": rng.choice(("", "", "drop", "add", "shape"))})),
    (2, _flag("reduces")),
    (1, _flag("all_reduces")),
    (2, _flag("reshards_after_forward")),
    (2, _flag("reshards_after_backward")),
    (1, _plain("unshard")),
    (1, _plain("reshard")),
    (1, _names),
    (1, _plain("optim_local")),
    (1, _plain("write_params")),
    (1, _plain("write_grads")),
    (1, _plain("look")),
]
