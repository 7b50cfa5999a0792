"""Weight decay is applied to the parameters that transformers' Trainer decays, except vectors, in every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import families
from megatrain.models.structure import undecayed_parameters
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import hyper_parameters


@pytest.mark.parametrize("name", sorted(families.BY_NAME))
def test_decay_follows_the_trainer_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(families.config(families.BY_NAME[name]))
    undecayed, optim = undecayed_parameters(model), AdamW(weight_decay=0.1)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ours = {n for n, p in parameters.items() if hyper_parameters(n, p.ndim, optim, undecayed)[0] > 0}
    named = Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]  (it uses no self)
    theirs = {n for n in named if n in parameters and parameters[n].ndim >= 2}
    assert ours - theirs == set()
    extra = theirs - ours
    assert all(n in undecayed for n in extra), extra


def test_norms_with_odd_names_and_marked_parameters_are_known_by_their_modules() -> None:
    class PerHeadRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 8))

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(4, 8))

    model = nn.Module()
    model.first, model.second, model.third = PerHeadRMSNorm(), nn.LayerNorm([2, 3]), Normalized()
    model.state = nn.Parameter(torch.ones(2, 2))
    setattr(model.state, "_no_weight_decay", True)  # noqa: B010  (torch declares no such attribute)
    assert undecayed_parameters(model) == {"first.scale", "second.weight", "second.bias", "state"}
