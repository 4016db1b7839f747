"""The two sides of a draw: the same calls, of torch's classes and of ours.

A side builds the model that the draw describes and has a method `do_NAME` for each of its calls.
What a method returns is compared with what the other side returns.
"""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import sharding
from tests.differential.building import (
    Groups,
    built,
    clean,
    filled,
    is_unit,
    mean_hook,
    parent_of,
    policy,
    policy_of_precision,
    precision,
    states_of,
    values_for,
    whole,
)
from tests.differential.changing import changed, changed_optimizer
from tests.differential.draws import Draw, paths_of
from tests.differential.models import WIDTH

ENGINES: dict[str, Any] = {"torch": torch_fsdp, "ours": sharding}
EPS = 2.0**-4


# Sides -------------------------------------------------------------------------------------------


class Side:
    """What both faces have in common."""

    def __init__(self, draw: Draw, engine: str, groups: Groups) -> None:
        self.draw = draw
        self.engine = engine
        self.module = ENGINES[engine]
        self.groups = groups
        self.batches = 0
        self._wrong: list[str] = []
        self.dtype = getattr(torch, draw.dtype)
        self.model: Any = self.wrapped()
        self.optimizer = self.made_optimizer()

    def wrapped(self) -> nn.Module:
        raise NotImplementedError

    def bare(self) -> nn.Module:
        """The model before it is wrapped."""
        draw = self.draw
        with torch.device("meta" if draw.extra == "meta" else "cpu"):
            model = built(draw)
        if draw.group == "tensor":
            plan: dict[str, Any] = {}
            for path in paths_of(draw.tree, "mlp"):
                plan |= {f"{path}.up": ColwiseParallel(), f"{path}.down": RowwiseParallel()}
            parallelize_module(model, self.groups.tensor_axis, plan)
        return model

    def taken_wrong(self) -> list[str]:
        """What this side itself finds wrong in its last call, where torch's side shows nothing."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def made_optimizer(self) -> torch.optim.Optimizer:
        params = list(self.model.parameters())
        # An update is at most lr / eps times a gradient: noise where gradients should be zero, as
        # before a norm over the batch, stays noise.
        kinds: dict[str, Any] = {
            "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
            "adam": functools.partial(torch.optim.Adam, eps=EPS),
            "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.1, eps=EPS),
            "foreach": functools.partial(torch.optim.AdamW, foreach=True, eps=EPS),
            "adagrad": functools.partial(torch.optim.Adagrad, eps=EPS),
            "rmsprop": functools.partial(torch.optim.RMSprop, eps=EPS),
        }
        groups = [{"params": params[first :: self.draw.param_groups]} for first in (0, 1)]
        groups = [group for group in groups[: self.draw.param_groups] if group["params"]]
        if len(groups) > 1:
            groups[1]["lr"] = 0.001
        return kinds[self.draw.optimizer](groups, lr=0.01)

    def batch(self) -> torch.Tensor:
        self.batches += 1
        # Ranks along an axis of tensor parallelism have one batch.
        here = dist.get_rank() // 2 if self.draw.group == "tensor" else dist.get_rank()
        seed = (self.draw.seed * 1000 + self.batches) * 8 + here
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(3, WIDTH, generator=generator).to(self.dtype)

    def forward_backward(self) -> list[Any]:
        output = self.model(self.batch())
        loss = output.float().square().mean()
        loss.backward()
        return [output.dtype, loss.detach()]

    def local(self) -> Any:
        """What this rank holds: parameters, gradients and buffers."""
        params = {
            name: (param.detach(), param.requires_grad, param.grad)
            for name, param in self.model.named_parameters()
        }
        return {"params": params, "buffers": dict(self.model.named_buffers())}

    # --- calls of both faces --------------------------------------------------------------------

    def do_train(self, steps: int) -> Any:
        seen = []
        for _ in range(steps):
            seen.append(self.forward_backward())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen

    def do_step(self) -> Any:
        self.optimizer.step()

    def do_zero(self, to_none: bool, of: str) -> Any:
        owner: Any = self.model if of == "model" else self.optimizer
        owner.zero_grad(set_to_none=to_none)

    def do_evaluate(self, train: bool) -> Any:
        self.model.train(train)
        with torch.no_grad():
            output = self.model(self.batch())
        self.model.train()
        return output

    def do_write_params(self) -> Any:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(1.5)

    def do_write_grads(self) -> Any:
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def do_convert(self, to: str) -> Any:
        self.dtype = getattr(torch, to)
        self.model.to(self.dtype)

    def do_optim_local(self) -> Any:
        state = self.optimizer.state_dict()
        return {"state": state["state"], "groups": state["param_groups"]}


class FlatSide(Side):
    """`FullyShardedDataParallel`."""

    @property
    def cls(self) -> Any:
        return self.module.FullyShardedDataParallel

    def wrapped(self) -> nn.Module:
        draw = self.draw
        model = self.bare()
        kwargs: dict[str, Any] = {
            **self.groups.arguments(draw),
            **self.extras(),
            "sharding_strategy": ShardingStrategy[draw.strategy],
            "use_orig_params": draw.orig,
            "mixed_precision": precision(draw.precision),
            "forward_prefetch": draw.prefetch,
            "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST
            if draw.prefetch
            else torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
            "device_id": torch.device("cpu"),
        }
        if draw.ignored is not None:
            ignored = model.get_submodule(draw.ignored)
            if draw.extra == "states":
                kwargs["ignored_states"] = list(ignored.parameters())
            else:
                kwargs["ignored_modules"] = [ignored]
        wrapped = self.units(model, kwargs)
        if draw.extra == "hook":
            wrapped.register_comm_hook(self.groups.reducing(draw), mean_hook)
        return wrapped

    def extras(self) -> dict[str, Any]:
        """Arguments of the wrapper. torch's class can neither offload nor synchronise on the CPU:
        that it computes the same without is what is compared.
        """
        if self.draw.extra == "meta":
            return {"param_init_fn": filled}
        if self.engine == "ours" and self.draw.extra == "offload":
            return {"cpu_offload": torch_fsdp.CPUOffload(offload_params=True)}
        if self.engine == "ours" and self.draw.extra == "sync":
            return {"sync_module_states": True}
        return {}

    def bare(self) -> nn.Module:
        model = super().bare()
        if self.engine == "ours" and self.draw.extra == "sync":
            place = dist.get_rank()
            if self.draw.group == "sub":
                place = dist.get_rank(self.groups.reducing(self.draw))
            alone = set() if self.draw.ignored is None else states_of(model, self.draw.ignored)
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    if id(tensor) not in alone:
                        tensor.add_(place)
        return model

    def units(self, model: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
        """The model with its wrappers."""
        draw = self.draw
        if draw.wrapping and draw.wrapping[0] == "policy":
            wrapped: nn.Module = self.cls(
                model, auto_wrap_policy=policy(draw.wrapping[1]), **kwargs
            )
            return wrapped
        for path in sorted(draw.wrapping, key=lambda path: -path.count(".")):
            if draw.ignored is not None and f"{path}.".startswith(f"{draw.ignored}."):
                continue
            parent, name = parent_of(model, path)
            setattr(parent, name, self.cls(getattr(parent, name), **kwargs))
        outer: nn.Module = self.cls(model, **kwargs)
        return outer

    def inner(self) -> Any:
        """The last unit, or the root where there is no other."""
        return self.cls.fsdp_modules(self.model)[-1]

    def configs(self, form: str, offload: bool, rank0: bool, config: bool) -> tuple[Any, ...]:
        kind = getattr(self.module.StateDictType, f"{form}_STATE_DICT")
        if not config:
            return (kind,)
        names = {"FULL": "Full", "SHARDED": "Sharded", "LOCAL": "Local"}
        model = getattr(self.module, f"{names[form]}StateDictConfig")
        optim = getattr(self.module, f"{names[form]}OptimStateDictConfig")
        if form == "FULL":
            return kind, model(offload, rank0), optim(offload, rank0)
        return kind, model(offload), optim(offload)

    # --- training -------------------------------------------------------------------------------

    def do_backward(self, sync: bool, forwards: int) -> Any:
        with nullcontext() if sync else self.model.no_sync():
            if forwards == 1:
                return self.forward_backward()
            first, second = self.model(self.batch()), self.model(self.batch())
            loss = (first.float() * second.float()).sum()
            loss.backward()
            return loss.detach()

    def do_clip(self, max_norm: float, norm: float) -> Any:
        return self.model.clip_grad_norm_(max_norm, norm)

    # --- full parameters ------------------------------------------------------------------------

    def do_summon(self, change: bool, inner: bool, **kwargs: Any) -> Any:
        module = self.inner() if inner else self.model
        self.model.check_is_root()  # an inner unit that comes first would be a root of its own
        with self.cls.summon_full_params(module, **kwargs):
            seen = {
                name: (param.detach().clone(), param.grad)
                for name, param in self.model.named_parameters()
            }
            if change:
                with torch.no_grad():
                    for param in module.parameters():
                        param.add_(0.25)
                        if kwargs["with_grads"] and param.grad is not None:
                            param.grad.mul_(2.0)
        return list(seen.items())

    def do_full(self) -> Any:
        with self.cls.summon_full_params(self.model, writeback=False):
            return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def do_apply(self, inner: bool) -> Any:
        seen = []

        def shrink(module: nn.Module) -> None:
            with torch.no_grad():
                for param in module.parameters(recurse=False):
                    seen.append(tuple(param.shape))
                    param.mul_(0.5)

        self.model.check_is_root()
        (self.inner() if inner else self.model).apply(shrink)
        return seen

    def do_names(self, summoned: bool) -> Any:
        with self.cls.summon_full_params(self.model) if summoned else nullcontext():
            return [
                [name for name, _ in self.model.named_parameters()],
                [name for name, _ in self.model.named_buffers()],
                [name for name, _ in self.model.named_parameters(remove_duplicate=False)],
            ]

    def do_look(self) -> Any:
        units = self.cls.fsdp_modules(self.model)
        return {
            "units": len(units),
            "roots": [unit.check_is_root() for unit in units],
            "outer": len(self.cls.fsdp_modules(self.model, root_only=True)),
            "module": type(self.model.module).__name__,
            "first": type(self.model[0]).__name__,
            "training": [module.training for module in self.model.modules()],
        }

    # --- state dicts ----------------------------------------------------------------------------

    def do_set_type(self, wrong: bool, form: str, **config: bool) -> Any:
        arguments = self.configs(form, **config)
        if wrong:
            arguments = (arguments[0], self.module.StateDictConfig())
        return _settings(self.cls.set_state_dict_type(self.model, *arguments))

    def do_state(self, form: str, prefix: str, **config: bool) -> Any:
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            state = self.model.state_dict(prefix=prefix)
        if form == "FULL" and self.engine == "torch" and self.draw.group == "tensor":
            # torch gathers tensor-parallel members along its own axis only: compared are all parts.
            state = {key: whole(value) for key, value in state.items()}
        return self.by_member(state, prefix) if form == "LOCAL" else state

    def by_member(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """A LOCAL dict as what it holds of each member: where its run begins, and the run."""
        parts: dict[str, Any] = {}
        for key, value in state.items():
            if not hasattr(value, "local_shards"):
                parts.setdefault(key, value)
            elif self.engine == "ours":
                for shard in value.local_shards():
                    parts[key] = [shard.metadata.shard_offsets[0], shard.tensor.reshape(-1)]
            else:
                parts.update(self.members_of(key, value, prefix))
        # Beside the flat parameter torch's has original ones, on ranks without a part of them too.
        return {key: parts[key] for key in sorted(parts) if parts[key] is not None}

    def members_of(self, key: str, value: Any, prefix: str) -> dict[str, Any]:
        """The parts of members in the shard of a flat parameter of torch's class."""
        below = key.removeprefix(prefix).rpartition("_flat_param")[0]
        units = {clean(name): unit for name, unit in self.model.named_modules() if is_unit(unit)}
        flat = units[below.removesuffix(".")]._handle.flat_param
        # torch lists no shard where this rank's would be padding alone.
        shards = [shard.tensor.detach().reshape(-1) for shard in value.local_shards()]
        parts: dict[str, Any] = {f"{prefix}{below}{fqn}": None for fqn in flat._fqns}
        for name, info in zip(list(parts), flat._shard_param_infos, strict=True):
            if info.in_shard and info.numel_in_shard:
                run = shards[0][info.offset_in_shard :][: info.numel_in_shard]
                parts[name] = [info.intra_param_start_idx, run]
        for tied in flat._shared_param_infos:
            first = ".".join(filter(None, (tied.prim_module_name, tied.prim_param_name)))
            other = ".".join(filter(None, (tied.module_name, tied.param_name)))
            parts[f"{prefix}{below}{other}"] = parts[f"{prefix}{below}{clean(first)}"]
        return parts

    def do_load(self, change: str, strict: bool, form: str, **config: bool) -> Any:
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            state = changed(self.model.state_dict(), change)
            keys = self.model.load_state_dict(state, strict=strict)
        return {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}

    def do_optim_state(self, form: str, given: Any, **config: bool) -> Any:
        own = self.optimizer.state_dict() if given == "own" else None
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            return self.cls.optim_state_dict(self.model, self.optimizer, own)

    def do_optim_load(
        self, directly: bool, named: bool, change: str, form: str, **config: bool
    ) -> Any:
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            state = changed_optimizer(self.cls.optim_state_dict(self.model, self.optimizer), change)
            to_load = self.cls.optim_state_dict_to_load(
                self.model, self.optimizer, state, load_directly=directly, is_named_optimizer=named
            )
        if named:  # optimizers that are keyed by names do not go by their order
            for group in to_load["param_groups"]:
                group["params"] = sorted(group["params"])
        elif not directly:
            self.optimizer.load_state_dict(to_load)
        if change != "groups" and self.engine == "ours" and not named:
            self._wrong += self.kept_states(state)
        return {"found": to_load, "now": self.do_optim_local()}

    def kept_states(self, given: dict[str, Any]) -> list[str]:
        """Where the optimizer differs from a dict that was loaded into it; entries may lack."""
        form = self.configs("FULL", offload=False, rank0=False, config=True)
        full = given.get("state", {})
        with self.cls.state_dict_type(self.model, *form):
            now = self.cls.optim_state_dict(self.model, self.optimizer)["state"]
        if not full:
            return []  # the dict was the first rank's
        problems = [f"lost {name}" for name in full if name not in now]
        for name, state in now.items():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if name not in full:
                    is_as_meant = value.ndim == 0 or not value.any()
                else:
                    expected = full[name][key]
                    is_as_meant = type(expected) is not torch.Tensor or expected.equal(value)
                problems += [] if is_as_meant else [f"{name} {key} is {value}"]
        return problems

    def do_legacy(self, kind: str) -> Any:
        model, optimizer, cls = self.model, self.optimizer, self.cls
        if kind == "sharded":
            return cls.sharded_optim_state_dict(model, optimizer)
        if kind == "flatten":
            state = cls.sharded_optim_state_dict(model, optimizer)
            return cls.flatten_sharded_optim_state_dict(state, model, optimizer)
        state = cls.full_optim_state_dict(model, optimizer, rank0_only=kind != "shard")
        if kind == "scatter":
            return cls.scatter_full_optim_state_dict(state, model, optim=optimizer)
        if kind == "shard":
            return cls.shard_full_optim_state_dict(state, model, optim=optimizer)
        return state

    def do_rekey(self, to: str, rank0: bool) -> Any:
        bare = built(self.draw)
        kinds = self.module.OptimStateKeyType
        bare_optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        state = self.cls.full_optim_state_dict(self.model, self.optimizer, rank0_only=rank0)
        if to == "id":
            return self.cls.rekey_optim_state_dict(
                state, kinds.PARAM_ID, bare, optim=bare_optimizer
            )
        ids = self.cls.rekey_optim_state_dict(state, kinds.PARAM_ID, bare, optim=bare_optimizer)
        return self.cls.rekey_optim_state_dict(ids, kinds.PARAM_NAME, bare, optim=bare_optimizer)


class FullySide(Side):
    """`fully_shard`."""

    def wrapped(self) -> nn.Module:
        draw = self.draw
        model = self.bare()
        mesh = self.groups.arguments(draw).get("device_mesh")
        kwargs: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": draw.reshard,
            "mp_policy": policy_of_precision(draw.precision),
        }
        if draw.ignored is not None:
            kwargs["ignored_params"] = set(model.get_submodule(draw.ignored).parameters())
        if draw.extra == "offload":
            kwargs["offload_policy"] = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
        for path in sorted(draw.wrapping, key=lambda path: -path.count(".")):
            self.module.fully_shard(model.get_submodule(path), **kwargs)
        self.module.fully_shard(model, **kwargs)
        if draw.extra == "hook":
            model.set_all_reduce_hook(lambda total: total.mul_(0.75))
        if draw.extra == "meta":
            self.fill(model)
        return model

    def local(self) -> Any:
        """Also the shards that the optimizer holds: torch's side may show gathered ones instead."""
        held = [param for group in self.optimizer.param_groups for param in group["params"]]
        shards = {id(param) for param in held}
        if self.engine == "ours" and self.draw.group != "tensor":
            shown = [param for param in self.model.parameters() if isinstance(param, DTensor)]
            if not {id(param) for param in shown} <= shards:
                self._wrong.append("parameters() gives other shards than the optimizer holds")
        return {**super().local(), "held": [(param.detach(), param.grad) for param in held]}

    def fill(self, model: nn.Module) -> None:
        """Values for what came from the meta device."""
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                values = values_for(tuple(tensor.shape)).to(tensor.dtype)
                if isinstance(tensor, DTensor):
                    values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
                tensor.copy_(values)

    def do_backward(self, sync: bool, forwards: int) -> Any:
        self.model.set_requires_gradient_sync(sync)
        if forwards == 1:
            result: Any = self.forward_backward()
        else:
            first, second = self.model(self.batch()), self.model(self.batch())
            loss = (first.float() * second.float()).sum()
            loss.backward()
            result = loss.detach()
        self.model.set_requires_gradient_sync(True)
        return result

    # Parameters are compared where both sides give the sharded ones.

    def do_write_params(self) -> Any:
        self.do_reshard()
        super().do_write_params()

    def do_write_grads(self) -> Any:
        self.do_reshard()
        super().do_write_grads()

    def do_zero(self, to_none: bool, of: str) -> Any:
        self.do_reshard()
        super().do_zero(to_none, of)

    def do_clip(self, max_norm: float, norm: float) -> Any:
        self.do_reshard()
        total_norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, float(norm))
        return total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm

    def do_module_state(self) -> Any:
        return self.model.state_dict()

    def do_module_load(self, change: str) -> Any:
        state = changed(copy.deepcopy(self.model.state_dict()), change)
        keys = self.model.load_state_dict(state, strict=change not in ("drop", "add"))
        return {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}

    def do_reduces(self, on: bool, recurse: bool) -> Any:
        self.model.set_requires_gradient_sync(on, recurse=recurse)

    def do_all_reduces(self, on: bool, recurse: bool) -> Any:
        self.model.set_requires_all_reduce(on, recurse=recurse)

    def do_reshards_after_forward(self, on: bool, recurse: bool) -> Any:
        self.model.set_reshard_after_forward(on, recurse=recurse)

    def do_reshards_after_backward(self, on: bool, recurse: bool) -> Any:
        self.model.set_reshard_after_backward(on, recurse=recurse)

    def do_unshard(self) -> Any:
        """What the modules of the root unit compute with: inner units are not gathered by this."""
        self.model.unshard()
        units = [name for name, module in self.model.named_modules() if self._is_unit(module)]
        seen = {}
        for name, _ in self.model.named_parameters():
            if not any(unit and name.startswith(f"{unit}.") for unit in units):
                module, attribute = parent_of(self.model, name)
                seen[name] = getattr(module, attribute).detach().clone()
        self.model.reshard()
        return seen

    def _is_unit(self, module: nn.Module) -> bool:
        return isinstance(module, self.module.FSDPModule)

    def do_reshard(self) -> Any:
        for module in self.model.modules():
            if self._is_unit(module):
                module.reshard()

    def do_names(self, summoned: bool) -> Any:
        return [
            [name for name, _ in self.model.named_parameters()],
            [name for name, _ in self.model.named_parameters(remove_duplicate=False)],
        ]

    def do_look(self) -> Any:
        return {
            "classes": [type(module).__name__ for module in self.model.modules()],
            "units": [self._is_unit(module) for module in self.model.modules()],
        }

    def do_full(self) -> Any:
        self.do_reshard()
        return {
            name: param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
            for name, param in self.model.named_parameters()
        }


def side(draw: Draw, engine: str, groups: Groups) -> Side:
    """The draw under this engine, "torch" or "ours"."""
    return (FlatSide if draw.face == "flat" else FullySide)(draw, engine, groups)


# Arguments ---------------------------------------------------------------------------------------


def _settings(settings: Any) -> Any:
    configs = (settings.state_dict_config, settings.optim_state_dict_config)
    return (
        settings.state_dict_type,
        *((type(config).__name__, vars(config)) for config in configs),
    )
