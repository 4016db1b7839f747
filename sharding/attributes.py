"""The attributes of a wrapper: what it consists of, and torch's names for what it was made with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload

from sharding.engine.groups import Groups
from sharding.engine.torch_seam import TrainingState
from sharding.engine.unit import Phase
from sharding.flat.unit import FlatUnit
from sharding.wrapping.init import Ignored

if TYPE_CHECKING:
    from sharding.flat.members import FlatParameter

CHILD = "_fsdp_wrapped_module"
"""The name of the wrapped module in the wrapper; torch's own."""

# torch's states do not distinguish a forward from a backward.
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

    def show_settings(self, unit: FlatUnit, groups: Groups, mesh: DeviceMesh | None) -> None:
        """Set torch's names for what the wrapper was made with."""
        settings = unit.settings
        self.fsdp_unit, self.fsdp_groups = unit, groups
        self.fsdp_mesh = self._device_mesh = mesh
        self.process_group: Any = groups.shard.group
        """The group over which this unit is sharded."""
        self.rank: int = groups.shard.rank
        """This rank's number in `process_group`."""
        self.world_size: int = groups.shard.size
        self.sharding_strategy = settings.strategy
        """The strategy in force: NO_SHARD over a group of one rank, whatever was requested."""
        self.mixed_precision = settings.precision
        """What was passed, or the default."""
        self.compute_device = settings.device
        """Where parameters are gathered and computed with."""
        self.cpu_offload = CPUOffload(offload_params=settings.offload)
        """Whether sharded parameters are kept on the host."""
        self.backward_prefetch = settings.backward_prefetch
        """When the next gather of a backward is started."""
        self.forward_prefetch = settings.forward_prefetch
        """Whether the next unit is gathered while this one's forward computes."""
        self.limit_all_gathers = settings.limit_all_gathers
        """Whether the host waits so that not too many gathers are under way."""
        self.is_sharded = settings.is_sharded
        """Whether this unit's parameters are split over ranks."""
        self.shows_original_params = self._use_orig_params = settings.use_orig_params
        """Whether optimizers see the members of its flat parameter."""

    @property
    def training_state(self) -> TrainingState:
        """What the unit is in the middle of: torch's enumeration."""
        return _TRAINING_STATES[self.fsdp_unit.phase]

    @property
    def params(self) -> list[FlatParameter]:
        """The flat parameter of this unit; [] when inner units hold all there is."""
        store = self.fsdp_unit.store
        return [] if store is None else [store.flat]

    # Read by torch's state dict functions.
    @property
    def _flat_param(self) -> FlatParameter | None:
        store = self.fsdp_unit.store
        if store is None:
            return None
        # torch's functions read the names from the parameter; nothing of ours does.
        store.flat.name_members(self.fsdp_member_names)
        return store.flat
