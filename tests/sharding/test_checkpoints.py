"""`ckpt.save` and `ckpt.load` serve our engine as every other: by pieces, without a gather.

Method: as in tests/e2e/test_matrix.py, real ranks train under one engine and save, a plain model in
one process loads, another engine on another number of ranks loads and saves again, and the second
plain model must equal the first bit for bit, optimizer included.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from benchmarks import engine_save
from ckpt.layout.modules import describe_module
from ckpt.layout.plain import Ranks
from tests.e2e import engines
from tests.e2e.engines import Net, Training, full_model
from tests.ranks import run_ranks
from tests.sharding.models import build as build_small
from tests.sharding.models import full_copies, wrapped

pytestmark = pytest.mark.ranks


def build(engine: str, optimizer: str, seed: int = 0) -> Training:
    if not engine.startswith("ours"):
        return engines.build(engine, optimizer, seed)  # type: ignore[arg-type]
    from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy

    torch.manual_seed(seed)
    kwargs: dict[str, Any] = {}
    if engine == "ours-hybrid":
        kwargs["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if engine == "ours-whole":
        kwargs["sharding_strategy"] = ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = FullyShardedDataParallel(
            Net(),
            auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
            use_orig_params=engine != "ours-flat",
            **kwargs,
        )
    if optimizer == "adamw":
        return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def gathered(training: Training) -> dict[str, torch.Tensor]:
    """The parameters by name, gathered by the engine itself."""
    names = dict(Net().named_parameters())
    if type(training.model).__module__.startswith("sharding"):
        return full_copies(training.model)
    return {name: value for name, value in full_model(training).items() if name in names}


def save(engine: str, optimizer: str, root: str) -> dict[str, torch.Tensor]:
    training = build(engine, optimizer)
    for seed in range(2):
        training.step(seed)
    ckpt.save({**training.state, "steps": 2}, root, step=2)
    return gathered(training)


def load_and_save(
    engine: str, optimizer: str, source: str, target: str, stepped: bool
) -> dict[str, torch.Tensor]:
    training = build(engine, optimizer, seed=7)
    if stepped:
        training.step(99)
    state = {**training.state, "steps": 0}
    ckpt.load(state, source)
    loaded = gathered(training)
    ckpt.save(state, target, step=3)
    training.step(5)  # what was loaded can be trained
    return loaded


def plain(optimizer: str, root: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    training = engines.build("plain", optimizer, seed=8)
    ckpt.load({**training.state, "steps": 0}, root)
    return training.model.state_dict(), training.optimizer.state_dict()


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


MOVES = [
    (("ours-flat", 4), ("fsdp2", 3)),
    (("ours-orig", 3), ("ours-flat", 4)),
    (("ours-flat", 2), ("ours-orig", 4)),
    (("fsdp1-orig", 2), ("ours-orig", 3)),
    (("fsdp1-flat", 3), ("ours-flat", 2)),
    (("ours-orig", 4), ("fsdp1-flat", 2)),
    (("fsdp2", 2), ("ours-hybrid", 4)),
    (("ours-hybrid", 4), ("ours-whole", 2)),
    (("ours-whole", 2), ("ours-flat", 3)),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("saver", "loader"), MOVES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_what_our_engine_saves_others_load_and_back(
    saver: tuple[str, int], loader: tuple[str, int], tmp_path: Path
) -> None:
    optimizer = "adamw" if (saver[1] + loader[1]) % 2 else "sgd"
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    trained = run_ranks(saver[1], save, saver[0], optimizer, source)
    model, optim = run_ranks(1, plain, optimizer, source)[0]
    for values in filter(None, trained):
        assert_equal(values, {name: model[name] for name in values})
    stepped = loader[1] % 2 == 0
    loaded = run_ranks(loader[1], load_and_save, loader[0], optimizer, source, target, stepped)
    for values in filter(None, loaded):
        assert_equal(values, {name: model[name] for name in values})
    model_again, optim_again = run_ranks(1, plain, optimizer, target)[0]
    assert_equal(model_again, model)
    assert_equal(optim_again, optim)


def describe_tied() -> None:
    for orig, strategy in itertools.product((False, True), ("FULL_SHARD", "NO_SHARD")):
        from sharding import ShardingStrategy

        model = wrapped(
            "ours",
            build_small("tied"),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        ranks = Ranks(dist.get_rank(), tuple(range(dist.get_world_size())))
        layout = describe_module(model, ranks)
        assert not layout.problems
        assert dict(layout.aliases) == {"1.second.weight": "1.first.weight"}
        names = {
            piece.fqn for owned in layout.params for view in owned.views for piece in view.pieces
        }
        assert names == set(dict(build_small("tied").named_parameters()))
        for param in model.parameters():
            assert id(param) in layout.owned_by_param


def test_tied_parameters_are_stored_once_and_known_by_both_names() -> None:
    run_ranks(2, describe_tied)


def load_between() -> None:
    """Before the first forward, after an eval forward, and between forward and backward."""
    for orig in (False, True):
        model = wrapped("ours", build_small("uneven"), use_orig_params=orig)
        x = torch.ones(2, 6)
        for moment in ("before the first", "between forward and backward", "after eval"):
            if moment != "before the first":
                model.train(moment != "after eval")(x)
            layout = describe_module(model, Ranks(dist.get_rank(), (0, 1)))
            layout.reshard()
            for owned in layout.params:
                owned.local.fill_(0.5)
            with torch.no_grad():
                out = model(x)
            wanted = build_small("uneven")
            for param in wanted.parameters():
                param.data.fill_(0.5)
            torch.testing.assert_close(out, wanted(x), msg=moment)


def test_what_is_loaded_is_seen_by_the_next_forward() -> None:
    run_ranks(2, load_between)


def counted(url: str) -> str:
    state = engine_save.trained("ours, flat", nbytes=3 * 3 * 4 * engine_save.WIDTH**2)
    return engine_save.check_counts(state, url)


def test_saving_sends_no_tensor_and_writes_few_small_pieces(tmp_path: Path) -> None:
    run_ranks(2, counted, str(tmp_path / "run"))
