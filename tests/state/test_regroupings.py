"""Random regroupings of optimizers and partial models, against torch's `load_state_dict`.

A training is saved and another one loads it: the groups in another order, joined or split, layers
new, gone, frozen or unfrozen, options of the same names or others, with and without `strict`,
`skip`, `new` and `group_options`. What has to happen follows from the parameters alone, one by one:

- where parameters of one group would get different options, or a saved group would give one option
  to live groups that have it differently, the load is refused, by the option's name;
- where a name is missing on one side and nothing allows it, it is refused by that name;
- else the training has exactly what torch makes of it: an optimizer of torch with a group for each
  parameter loads the saved state of each by `load_state_dict`, and both make the same steps.

A refused load changes nothing. Where nothing was regrouped, torch's own positional load is compared
as well.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import Mismatch
from tests.conftest import Scale

LAYERS = ("a", "b", "c", "d")
Options = dict[str, Any]
Kind = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "adamw": (lambda groups: torch.optim.AdamW(groups), ("lr", "weight_decay", "eps")),
    "sgd": (lambda groups: torch.optim.SGD(groups, lr=0.1), ("lr", "momentum", "weight_decay")),
}


@dataclass
class Training:
    """A model, an optimizer, and each parameter's name. `frozen` are not in the optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    names: dict[torch.Tensor, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {param: name for name, param in self.model.named_parameters()}

    @property
    def state(self) -> dict[str, Any]:
        return {"m": self.model, "o": self.optimizer}

    def options(self) -> dict[str, Options]:
        """By the names of parameters."""
        return {
            self.names[param]: {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
            for param in group["params"]
        }

    def groups(self) -> dict[str, int]:
        """By the names of parameters."""
        groups = enumerate(self.optimizer.param_groups)
        return {self.names[p]: number for number, group in groups for p in group["params"]}

    def step(self, seed: int) -> None:
        """One step with gradients that depend on the names alone."""
        for param, name in self.names.items():
            generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
            param.grad = torch.randn(param.shape, generator=generator)
        self.optimizer.step()


def model_of(layers: tuple[str, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in layers})


def drawn(draw: random.Random, kind: str, layers: tuple[str, ...], seed: int) -> Training:
    """Parameters in random groups, some of them in none."""
    model = model_of(layers, seed)
    make, keys = KINDS[kind]
    params = [p for _, p in model.named_parameters() if draw.random() > 0.1] or [
        *model.parameters()
    ]
    count = draw.randint(1, 3)
    members: list[list[torch.Tensor]] = [[] for _ in range(count)]
    by = draw.choice(("kind", "any", "one"))
    for param in params:
        place = {"kind": param.ndim % count, "any": draw.randrange(count), "one": 0}[by]
        members[place].append(param)
    groups = [
        {"params": group, **{key: draw.choice((0.5, 0.25)) for key in keys if draw.random() < 0.4}}
        for group in members
        if group
    ]
    return Training(model, make(groups))


def changed(draw: random.Random, source: Training, kind: str, layers: tuple[str, ...]) -> Training:
    """The same groups of what is left, in another order perhaps, or other ones."""
    if draw.random() < 0.4:
        return drawn(draw, kind, layers, seed=1)
    model = model_of(layers, 1)
    mine = dict(model.named_parameters())
    groups = []
    for group in source.optimizer.param_groups:
        names = [name for p in group["params"] if (name := source.names[p]) in mine]
        draw.shuffle(names)
        options = {key: item for key, item in group.items() if key != "params"}
        if draw.random() < 0.3:
            options["lr"] = draw.choice((0.5, 0.125))
        if names:
            groups.append({"params": [mine[name] for name in names], **options})
    used = {id(p) for group in groups for p in group["params"]}
    rest = [param for param in mine.values() if id(param) not in used]
    if rest and draw.random() < 0.8:
        into = draw.choice((*groups, None))
        if into is None:
            groups.append({"params": rest})
        else:
            into["params"] += rest
    draw.shuffle(groups)
    return Training(model, KINDS[kind][0](groups or [{"params": [*model.parameters()]}]))


def conflicts(source: Training, target: Training, policy: Any) -> set[str]:
    """The options that cannot be what all sides want, pair by pair of parameters."""
    saved, live = source.options(), target.options()
    groups, saved_groups = target.groups(), source.groups()
    both = [name for name in live if name in saved]
    differing = set()
    for key in KINDS_KEYS:
        says = policy if isinstance(policy, str) else policy.get(key)
        for p in both:
            for q in both:
                if says == "live" or key not in saved[p]:
                    continue
                is_joined = groups[p] == groups[q]
                if is_joined and saved[p][key] != saved[q][key]:
                    differing.add(key)
                is_split = saved_groups[p] == saved_groups[q] and not is_joined
                if is_split and says is None and live[p][key] != live[q][key]:
                    differing.add(key)
    return differing


KINDS_KEYS = ("lr", "weight_decay", "eps", "momentum")


def oracle(source: Training, target: Training, policy: Any) -> Training:
    """What the target has to be, as torch loads it parameter by parameter."""
    model = copy.deepcopy(target.model)
    saved_tensors = source.model.state_dict()
    tensors = {name: saved_tensors.get(name, old) for name, old in model.state_dict().items()}
    model.load_state_dict(tensors)
    mine = dict(model.named_parameters())
    saved, live, of_group = source.options(), target.options(), target.groups()
    # What a new parameter gets is what its group has after the load.
    chosen: dict[int, Options] = {}
    for name, number in of_group.items():
        if name in saved:
            keep = {
                key
                for key in live[name]
                if (policy if isinstance(policy, str) else policy.get(key)) == "live"
            }
            options = {key: item for key, item in saved[name].items() if key not in keep}
            chosen[number] = {**live[name], **options}
    groups = [
        {"params": [mine[name]], **chosen.get(number, live[name])}
        for name, number in of_group.items()
    ]
    optimizer = type(target.optimizer)(groups)
    numbers = {name: number for number, name in enumerate(of_group)}
    state = {
        numbers[name]: copy.deepcopy(dict(source.optimizer.state[param]))
        for param, name in source.names.items()
        if name in numbers and name in saved and param in source.optimizer.state
    }
    kept = {
        numbers[name]: copy.deepcopy(dict(target.optimizer.state[param]))
        for param, name in target.names.items()
        if name in numbers and name not in saved and param in target.optimizer.state
    }
    packed = optimizer.state_dict()
    optimizer.load_state_dict({**packed, "state": {**state, **kept}})
    return Training(model, optimizer)


def shown(tree: Any) -> str:
    """A state dict as text, whatever the order of its keys."""
    if isinstance(tree, dict):
        return repr(sorted((repr(key), shown(item)) for key, item in tree.items()))
    if isinstance(tree, (list, tuple)):
        return repr([shown(item) for item in tree])
    return repr(tree.tolist() if isinstance(tree, torch.Tensor) else tree)


def snapshot(training: Training) -> str:
    return shown([training.model.state_dict(), training.optimizer.state_dict()])


def rules(draw: random.Random, source: Training, target: Training) -> Mapping[str, Any]:
    """How the load is called, and the names that this excuses."""
    how: dict[str, Any] = {"strict": draw.random() < 0.6}
    layers = {name.split(".")[0] for name in target.names.values()}
    saved_layers = {name.split(".")[0] for name in source.names.values()}
    if draw.random() < 0.7:
        if new := sorted(layers - saved_layers):
            how["new"] = [f"m.{name}" for name in new]
        if gone := sorted(saved_layers - layers):
            how["skip"] = [f"m.{name}" for name in gone]
    if draw.random() < 0.3:
        keys = [key for key in ("lr", "weight_decay") if draw.random() < 0.7]
        policy: Any = {key: draw.choice(("saved", "live")) for key in keys}
        how["group_options"] = draw.choice((policy, "live", "saved"))
    return how


def missing(source: Training, target: Training, how: Mapping[str, Any]) -> set[str]:
    """Names that one side lacks and nothing excuses."""
    if not how["strict"]:
        return set()
    excused = {name.removeprefix("m.") for key in ("new", "skip") for name in how.get(key, ())}
    names = {*source.names.values()} ^ {*target.names.values()}
    names |= source.options().keys() ^ target.options().keys()
    return {name for name in names if name.split(".")[0] not in excused}


def check(seed: int, url: str) -> str:
    """One case; returns how it ended."""
    draw = random.Random(seed)
    kind = draw.choice(sorted(KINDS))
    layers = tuple(draw.sample(LAYERS, draw.randint(1, 3)))
    source = drawn(draw, kind, layers, seed=0)
    for step in range(draw.randint(0, 2)):
        source.step(step)
    ckpt.save(source.state, url, step=1)
    is_same = draw.random() < 0.15
    if is_same:
        target = copy.deepcopy(source)
    else:
        other = layers if draw.random() < 0.4 else tuple(draw.sample(LAYERS, draw.randint(1, 4)))
        other = tuple(dict.fromkeys((*other, layers[0])))  # where no name matches, all is refused
        target = changed(draw, source, kind, other)
    target = Training(target.model, target.optimizer)
    for step in range(draw.randint(0, 1)):
        target.step(step + 7)
    how = rules(draw, source, target)
    policy = how.get("group_options", {})
    differing = conflicts(source, target, policy)
    lacking = missing(source, target, how)
    expected = None if differing or lacking else oracle(source, target, policy)
    before = snapshot(target)
    try:
        ckpt.load(target.state, url, **how)
    except Mismatch as refused:
        text = "\n".join(refused.problems)
        assert expected is None, f"refused without a reason: {text}"
        assert snapshot(target) == before
        assert all(key in text for key in differing), (differing, text)
        assert all(name in text or "parameters more" in text for name in lacking), text
        return "refused"
    assert expected is not None, f"not refused: {differing} {lacking}"
    assert target.options() == expected.options()
    if is_same and "group_options" not in how:
        torchs = copy.deepcopy(expected)
        torchs = Training(torchs.model, type(target.optimizer)(_groups_of(torchs, target)))
        torchs.optimizer.load_state_dict(source.optimizer.state_dict())
        assert snapshot(torchs) == snapshot(target)
    for step in range(2):
        assert snapshot_of_params(target) == snapshot_of_params(expected)
        target.step(step)
        expected.step(step)
    return "loaded"


def _groups_of(duplicate: Training, target: Training) -> list[Options]:
    """The target's groups, of the parameters of a duplicate."""
    mine = {name: param for param, name in duplicate.names.items()}
    return [
        {**group, "params": [mine[target.names[param]] for param in group["params"]]}
        for group in target.optimizer.param_groups
    ]


def snapshot_of_params(training: Training) -> dict[str, str]:
    state = training.optimizer.state
    return {name: shown([p, dict(state.get(p, {}))]) for p, name in training.names.items()}


def test_random_regroupings_are_torchs_or_refused(
    scale: Scale, seed: int, request: pytest.FixtureRequest
) -> None:
    outcomes = {"loaded": 0, "refused": 0}
    for case in range(scale.count(60, 1000)):
        try:
            outcomes[check(seed + case, f"memory://{request.node.name}-{case}")] += 1
        except AssertionError as failure:
            raise AssertionError(f"case {seed + case}: {failure}") from failure
    assert min(outcomes.values()) > scale.count(60, 1000) // 5, outcomes
