"""A chain of stages computes what the model computes, family by family; families that cannot be cut are refused."""

from __future__ import annotations

import pytest
import torch

import families
from fp64 import Fp32MeansFp64
from megatrain.engine.mesh.stage import CUT, Part, cut, verify_cut, verify_family_cut
from megatrain.errors import UserError
from megatrain.models.structure import dissect

EXACT = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text granite cohere smollm3 olmo2 qwen3_moe mixtral gpt_neox".split()
)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("tie", [False, True])
def test_a_chain_of_stages_computes_what_the_model_does(name, tie):
    family = families.BY_NAME[name]
    model = families.build(family, seed=1, dtype=torch.float64, tie=tie)
    if "moe" in family.tags:
        model.set_experts_implementation("eager")  # the grouped matrix product has no fp64
    batch = families.batch(family, seed=2, rows=2, tokens=16)
    with Fp32MeansFp64():
        verify_cut(model, batch, stages=3, tolerance=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "gemma3n_text"])
def test_a_family_that_cannot_be_cut_is_refused(name):
    family = families.BY_NAME[name]
    model = families.build(family, seed=1)
    with pytest.raises(UserError, match=r"parallel\.pipeline to 1"):
        verify_cut(model, families.batch(family, seed=2, rows=2, tokens=16))


def test_stages_hold_every_parameter_once_under_its_own_name():
    model = families.build(families.BY_NAME["llama"], seed=1, tie=False)
    structure = dissect(model)
    names = []
    for index, layers in enumerate([range(0, 1), range(1, 3), range(3, 4)]):
        names += [name for name, _ in cut(model, structure, Part(index, 3, layers)).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_the_last_stage_holds_a_copy_of_a_tied_head():
    model = families.build(families.BY_NAME["llama"], seed=1, tie=True)
    structure = dissect(model)
    last = dict(cut(model, structure, Part(1, 2, range(2, 4))).named_parameters())
    assert "lm_head.weight" in last and "model.embed_tokens.weight" not in last
    first = dict(cut(model, structure, Part(0, 2, range(0, 2))).named_parameters())
    assert "model.embed_tokens.weight" in first and "lm_head.weight" not in first and "model.norm.weight" not in first


def test_an_untested_family_is_verified_on_a_tiny_copy():
    assert not {"arcee", "gpt2"} & CUT
    verify_family_cut(families.config(families.BY_NAME["arcee"]))
    with pytest.raises(UserError, match=r"parallel\.pipeline to 1"):
        verify_family_cut(families.config(families.BY_NAME["gpt2"]))


def test_the_list_of_tested_families_is_tested_here():
    assert set(EXACT) == CUT
