"""Parameters in the order of an optimizer's ids, for a call that is not given the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["ListedParams"]


class ListedParams:
    """What an optimizer would be made of, a list of parameters or of groups, in its place.

    Ids count the parameters in this order. Groups, and all that is in them, are those of the state
    dict. Raises ValueError for an empty list, TypeError for what is neither parameters nor groups.
    """

    def __init__(self, given: Iterable[torch.Tensor | Mapping[str, Any]]) -> None:
        try:
            items = list(given)
        except TypeError as error:
            raise TypeError(
                f"parameters or groups of parameters are needed, got a {type(given).__name__}"
            ) from error
        if not items:
            raise ValueError("the list of parameters is empty; pass what the optimizer was given")
        self.params: list[torch.Tensor] = []
        for item in items:
            if isinstance(item, torch.Tensor) and isinstance(items[0], torch.Tensor):
                self.params.append(item)
            elif isinstance(item, dict) and isinstance(items[0], dict):
                own = item["params"]
                self.params += [own] if isinstance(own, torch.Tensor) else own
            else:
                raise TypeError(
                    "a list of parameters, or of dicts with the key params, is needed; this one "
                    f"has a {type(items[0]).__name__} and a {type(item).__name__}"
                )
        # One group, whatever was listed: the groups are those of the state dict, see `grouped`.
        self.param_groups: list[dict[str, Any]] = [{"params": self.params}]
        self.state: dict[Any, Any] = {}

    def grouped(
        self,
        groups: Sequence[Mapping[str, Any]],
        names_of: Callable[[torch.Tensor], Iterable[str]],
    ) -> list[dict[str, Any]]:
        """The parameters in the groups that a state dict has, by names; those in none are left out.

        `names_of` gives the names of a parameter.
        """
        listed = [set(group["params"]) for group in groups]
        return [
            {"params": [p for p in self.params if not names.isdisjoint(names_of(p))]}
            for names in listed
        ]
