"""When a save is due: a policy applied to one training, with the same result on all ranks."""

from __future__ import annotations

from ckpt.service.agreement import Decision, StepAgreement
from ckpt.service.policies import Observation, SavePolicy, by_all, by_coordinator
from ckpt.service.training import Training


class SaveSchedule:
    """Decides at each call of `step` whether a save is due, and why.

    Ranks do not wait for each other: what follows from the step each rank decides by itself, what
    needs a clock the coordinator proposes, and all ranks do it at a later call that they agree on.
    """

    def __init__(self, policy: SavePolicy, training: Training, agreement: StepAgreement) -> None:
        self._by_all, self._by_coordinator = by_all(policy), by_coordinator(policy)
        self._training = training
        self._agreement = agreement
        # Saves that were begun so far. All ranks begin the same ones, so equal numbers on two ranks
        # mean the same moment: a proposal that was made before another save began is out of date.
        self._saves_begun = 0
        self._proposed_at = -1
        self._signals: frozenset[int] = frozenset()
        self._last_save_seconds = training.now_seconds()

    def reasons(self, decision: Decision) -> tuple[str, ...]:
        """Why a save is due at this call of `step`; empty when none is."""
        observation = self._observe(decision)
        reasons = (*self._by_all.reasons(observation), *self._agreed_reasons(decision))
        if self._training.is_coordinator:
            reasons = (*reasons, *self._coordinators_reasons(observation))
        return reasons

    def reasons_at_exit(self, decision: Decision) -> tuple[str, ...]:
        """Why the end of the training needs a save. `decision` is what is left to do."""
        observation = self._observe(decision, closing=True)
        reasons = (*self._by_all.reasons(observation), *self._agreed_reasons(decision))
        return (*reasons, "a signal") if decision.signals else reasons

    def save_begun(self, now_seconds: float) -> None:
        """A save begins: what was requested until now is done by it."""
        self._saves_begun += 1
        self._signals = frozenset()
        self._last_save_seconds = now_seconds

    def restored(self) -> None:
        """The state is that of a checkpoint: intervals count from here."""
        self._last_save_seconds = self._training.now_seconds()

    def _observe(self, decision: Decision, *, closing: bool = False) -> Observation:
        # Signals add up until a save begins: `OnSignal() & EverySteps(100)` waits for both.
        self._signals |= decision.signals
        progress, costs = self._training.progress, self._training.costs
        return Observation(
            step=progress.step,
            # At the end no step was done since the last call, and none is due a second time.
            previous_step=progress.step if closing else progress.previous_step,
            now_seconds=self._training.now_seconds(),
            last_save_seconds=self._last_save_seconds,
            signals=self._signals,
            closing=closing,
            cost_seconds=costs.cost_seconds,
            persist_seconds=costs.persist_seconds,
        )

    def _coordinators_reasons(self, observation: Observation) -> tuple[str, ...]:
        """Reasons that need a clock. Other ranks do not have them yet, so where there are any the
        save is proposed, once, and made at a later call.
        """
        if self._proposed_at == self._saves_begun:
            return ()
        reasons = self._by_coordinator.reasons(observation)
        if reasons and self._training.world.size > 1:
            self._proposed_at = self._saves_begun
            self._agreement.propose(reasons=reasons, valid_at=self._saves_begun)
            return ()
        return reasons

    def _agreed_reasons(self, decision: Decision) -> tuple[str, ...]:
        """The coordinator's reasons, unless a save was begun since it proposed them."""
        return decision.reasons if decision.valid_at == self._saves_begun else ()
