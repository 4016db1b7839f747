"""The attributes of a wrapper: what it consists of, and torch's names for what it was made with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from sharding.engine.groups import Groups
from sharding.engine.torch_seam import TrainingState
from sharding.engine.unit import Phase
from sharding.flat.unit import FlatUnit
from sharding.wrapping.init import Ignored

if TYPE_CHECKING:
    from sharding.flat.members import FlatParameter

CHILD = "_fsdp_wrapped_module"
"""The name of the wrapped module in the wrapper; torch's own."""

# torch's states do not tell a forward from a backward.
_TRAINING_STATES = {
    Phase.IDLE: TrainingState.IDLE,
    Phase.FORWARD: TrainingState.FORWARD_BACKWARD,
    Phase.BACKWARD: TrainingState.FORWARD_BACKWARD,
    Phase.SUMMON: TrainingState.SUMMON_FULL_PARAMS,
}


class UnitAttributes:
    """What a wrapper consists of and was made with. To read, not to assign."""

    fsdp_unit: FlatUnit
    fsdp_groups: Groups
    fsdp_mesh: DeviceMesh | None
    fsdp_member_names: tuple[str, ...]
    fsdp_ignored: Ignored
    fsdp_names: tuple[str, ...]
    """Bare names of parameters and buffers below, in the order of the wrapped module's dict."""
    fsdp_buffer_dtypes: dict[str, torch.dtype]
    """What buffers were before mixed precision has cast them, by bare name."""
    syncs_states: bool
    """Whether the values of the first rank were broadcast when it was made."""

    @property
    def process_group(self) -> Any:
        """The group over which this unit is sharded."""
        return self.fsdp_groups.shard.group

    @property
    def rank(self) -> int:
        """This rank's number in `process_group`."""
        return self.fsdp_groups.shard.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self.fsdp_groups.shard.size

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force: NO_SHARD over a group of one rank, whatever was requested."""
        return self.fsdp_unit.settings.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """What was passed, or the default."""
        return self.fsdp_unit.settings.precision

    @property
    def compute_device(self) -> torch.device:
        """Where parameters are gathered and computed with."""
        return self.fsdp_unit.settings.device

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether sharded parameters are kept on the host."""
        return CPUOffload(offload_params=self.fsdp_unit.settings.offload)

    @property
    def training_state(self) -> TrainingState:
        """What the unit is in the middle of: torch's enumeration."""
        return _TRAINING_STATES[self.fsdp_unit.phase]

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the next gather of a backward is started."""
        return self.fsdp_unit.settings.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether the next unit is gathered while this one's forward computes."""
        return self.fsdp_unit.settings.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """Whether the host waits so that not too many gathers are under way."""
        return self.fsdp_unit.settings.limit_all_gathers

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameter of this unit; [] when inner units hold all there is."""
        store = self.fsdp_unit.store
        return [] if store is None else [store.flat]

    @property
    def is_sharded(self) -> bool:
        """Whether this unit's parameters are split over ranks."""
        return self.fsdp_unit.settings.is_sharded

    @property
    def shows_original_params(self) -> bool:
        """Whether optimizers see the members of its flat parameter, with `use_orig_params`."""
        return self.fsdp_unit.settings.use_orig_params

    # --- read by torch's state dict functions ----------------------------------------------------

    _use_orig_params = shows_original_params

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        return self.fsdp_mesh

    @property
    def _flat_param(self) -> FlatParameter | None:
        store = self.fsdp_unit.store
        if store is None:
            return None
        # torch's functions read the names from the parameter; nothing of ours does.
        store.flat.name_members(self.fsdp_member_names)
        return store.flat
