"""The optimizer of a config."""

from __future__ import annotations

from megatrain.config.schema import RunConfig
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import ParamGroup


def optimizer(run: RunConfig) -> AdamW:
    """The optimizer that the config describes."""
    section = run.optim
    return AdamW(
        learning_rate=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        groups=tuple(ParamGroup(group.pattern, group.weight_decay, group.lr_scale) for group in section.groups),
        moments=section.moments,
        seed=run.run.seed,
    )
