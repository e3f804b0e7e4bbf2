"""The experts that the routers of a mixture choose for each token: recorded by the engine, replayed by the trainer.

Engine and trainer round differently, and near a tie one of them takes another expert: log-probabilities of equal
weights then differ by far more than rounding explains. Replayed choices remove this, and keep the choice of the policy
that drew the tokens through all updates on them; the weights of the chosen experts are computed, and differentiated, by
the trainer's own router. Ma et al., "Stabilizing MoE reinforcement learning by aligning training and inference
routers", arXiv 2510.11370 (R3).
"""

# transformers has few types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recipes.language.models.expert_sizes import ExpertSizes, expert_sizes
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOPK: Final = (torch.topk, Tensor.topk)


class ExpertChoices(TorchFunctionMode):
    """The choices of experts in one forward pass.

    A router scores experts, [T, experts], and takes the best by `torch.topk`; what it computes of the chosen scores is
    left to it.

    Args:
        sizes: the sizes of the mixture.
        replayed: int16 [T, layers, chosen], the experts to take; -1 where the router chooses. None: all choices are the
            routers', and are recorded.
    """

    def __init__(self, sizes: ExpertSizes, replayed: Tensor | None = None) -> None:
        super().__init__()
        self._sizes = sizes
        self._replayed = replayed
        self._layer: int | None = None
        self._chosen: dict[int, Tensor] = {}

    @property
    def is_open(self) -> bool:
        """Whether a layer's forward pass has begun, and not ended."""
        return self._layer is not None

    def enter(self, layer: int) -> None:
        """Begin a layer's forward pass."""
        self._layer = layer
        self.__enter__()

    def leave(self) -> None:
        """End it."""
        if self._layer is not None:
            self._layer = None
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; from a router's choice on, with the experts that are replayed."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or self._layer is None:
            return result
        scores: Tensor = args[0] if args else cast("Mapping[str, Any]", kwargs)["input"]
        indices: Tensor = result[1]
        if scores.ndim != 2 or (scores.shape[1], indices.shape[1]) != self._sizes[1:]:
            return result
        if self._replayed is None:
            if self._layer in self._chosen:
                raise ConfigError(f"layer {self._layer} of the model chooses experts twice", help=_REMEDY)
            self._chosen[self._layer] = indices
            return result
        known = self._replayed[:, self._layer].long()
        indices = torch.where(known < 0, indices, known)
        return torch.return_types.topk((scores.gather(1, indices), indices))

    def recorded(self) -> Tensor:
        """Return the choices of the pass, int16 [T, layers, chosen]; -1 in layers without experts.

        Raises:
            ConfigError: no router chose by `torch.topk`.
        """
        if not self._chosen:
            raise ConfigError("the routers of the model do not choose experts by `torch.topk`", help=_REMEDY)
        none = torch.full_like(next(iter(self._chosen.values())), -1)
        return torch.stack([self._chosen.get(n, none) for n in range(self._sizes.layers)], dim=1).to(torch.int16)


_REMEDY = "write `actor.router_replay: false`"


def use_choices(model: PreTrainedModel, layers: Sequence[nn.Module]) -> ExpertSizes:
    """Let a model that `use_plans` has prepared follow the `choices` of the plan of a forward pass.

    Enable activation checkpointing of the layers before this call, not after it.

    Raises:
        ConfigError: it has no experts.
    """
    sizes = expert_sizes(cast("Any", model.config).get_text_config().to_dict())
    if sizes is None:
        raise ConfigError(f"`{type(model).__name__}` has no experts to choose from", help=_REMEDY)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(_enter, number), with_kwargs=True)
        layer.register_forward_hook(_leave, with_kwargs=True, always_call=True)
        again = getattr(layer, "_gradient_checkpointing_func", None)
        if again is not None:
            cast("Any", layer)._gradient_checkpointing_func = partial(_checkpointed, number, again)
    return sizes._replace(layers=len(layers))


def _choices(kwargs: Mapping[str, Any]) -> ExpertChoices | None:
    return getattr(kwargs.get("attention_plan"), "choices", None)


def _enter(number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    choices = _choices(kwargs)
    if choices is not None:
        choices.enter(number)


def _checkpointed(number: int, checkpoint: Callable[..., Any], function: partial[Any], *args: Any) -> Any:
    """Checkpoint a layer, whose hooks do not run where it is computed again."""

    def computed(*inputs: Any) -> Any:
        choices = _choices(function.keywords)
        if choices is None or choices.is_open:
            return function(*inputs)
        choices.enter(number)
        try:
            return function(*inputs)
        finally:
            choices.leave()

    return checkpoint(computed, *args)


def _leave(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    choices = _choices(kwargs)
    if choices is not None:
        choices.leave()
