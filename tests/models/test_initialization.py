"""Random initialisation into the planes: transformers' distributions, reproducible unit by unit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import Family, config
from hosted import BY_NAME, Hosted, host
from megatrain.errors import UserError
from megatrain.models import weights
from megatrain.models.build import build_meta_model
from megatrain.models.weights import initialize

# gpt2 scales c_proj by depth; gemma2's norms start at zero; the hybrids have special rules for dt_bias and A_log.
NAMES = ["llama", "gpt2", "gpt_neox", "qwen3_moe", "gemma2", "bamba", "qwen3_next", "deepseek_v3", "falcon_h1"]


def fresh(family: Family, split: bool = False) -> Hosted:
    dtype = torch.bfloat16 if split else torch.float32
    return host(build_meta_model(config(family), compute_dtype=dtype), split)


@pytest.mark.parametrize("name", NAMES)
def test_same_distribution_as_transformers(name: str):
    hosted = fresh(BY_NAME[name])
    initialize(hosted.structure, hosted.store, seed=5)
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(config(BY_NAME[name]))
    want = dict(plain.named_parameters())
    mine = hosted.masters()
    assert mine.keys() == want.keys()
    for key, tensor in mine.items():
        expected = want[key].detach().float()
        if expected.numel() == 1 or expected.std() == 0:
            assert torch.equal(tensor, expected), key
            continue
        # Standard errors of the mean and standard deviation of a normal sample; five of them are not chance.
        n, std = expected.numel(), expected.std().item()
        assert abs(tensor.mean() - expected.mean()) < 5 * std * math.sqrt(2 / n), key
        assert abs(tensor.std() - std) < 5 * std / math.sqrt(n) + 0.02 * std, key
    for key, buffer in hosted.buffers.items():
        assert torch.equal(buffer, plain.state_dict()[key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2", "bamba", "qwen3_next"])
def test_numbers_drawn_on_a_gpu_are_reproducible_and_distributed_alike(name: str):
    host_drawn, first, second = (fresh(BY_NAME[name]) for _ in range(3))
    initialize(host_drawn.structure, host_drawn.store, seed=5)
    for hosted in (first, second):
        initialize(hosted.structure, hosted.store, seed=5, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(first.planes().values(), second.planes().values(), strict=True))
    for key, want in host_drawn.masters().items():
        got = first.masters()[key]
        if want.numel() == 1 or want.std() == 0:
            assert torch.equal(got, want), key
        else:
            assert abs(got.std() - want.std()) < 7 * want.std() / math.sqrt(want.numel()) + 0.02 * want.std(), key


def test_the_model_is_on_meta_again_and_the_global_random_state_is_unchanged():
    hosted = fresh(BY_NAME["gpt2"])
    before = {name: id(p) for name, p in hosted.structure.model.named_parameters()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    initialize(hosted.structure, hosted.store, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.is_meta for p in hosted.structure.model.parameters())
    assert {name: id(p) for name, p in hosted.structure.model.named_parameters()} == before
    assert not hosted.store.units["layer.0"].states["m"].any()


def test_the_same_seed_gives_the_same_bits_at_any_depth_of_the_model():
    family = BY_NAME["llama"]
    deep, again, other = fresh(family, split=True), fresh(family, split=True), fresh(family, split=True)
    initialize(deep.structure, deep.store, seed=1)
    initialize(again.structure, again.store, seed=1)
    initialize(other.structure, other.store, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(deep.planes().values(), again.planes().values(), strict=True))
    weight = "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(deep.masters()[weight], other.masters()[weight])
    assert not torch.equal(deep.masters()[weight], deep.masters()[weight.replace(".1.", ".2.")])
    shallow = fresh(replace(family, overrides={**family.overrides, "num_hidden_layers": 2}), split=True)
    initialize(shallow.structure, shallow.store, seed=1)
    assert torch.equal(shallow.masters()[weight], deep.masters()[weight])


def test_masters_are_drawn_in_fp32():
    hosted = fresh(BY_NAME["llama"], split=True)
    initialize(hosted.structure, hosted.store, seed=0)
    lo = hosted.store.units["layer.0"].lo
    assert lo is not None
    assert lo.count_nonzero() > 0.9 * hosted.structure.layers[0].layout.param_count


def test_only_one_unit_is_real_at_a_time(monkeypatch: pytest.MonkeyPatch):
    hosted = fresh(BY_NAME["llama"])
    units = {unit.layout.param_count for unit in hosted.structure.units}
    seen: list[int] = []
    walk = weights._walk

    def spying(structure, unit):
        seen.append(sum(p.numel() for p in structure.model.parameters() if not p.is_meta))
        return walk(structure, unit)

    monkeypatch.setattr(weights, "_walk", spying)
    initialize(hosted.structure, hosted.store, seed=0)
    assert len(seen) == len(hosted.structure.units)
    assert set(seen) == units


def test_a_family_that_leaves_a_parameter_uninitialised_is_refused():
    hosted = fresh(BY_NAME["openai-gpt"])
    with pytest.raises(UserError, match=r"does not set transformer\.h\.0\.attn\.c_attn\.weight"):
        initialize(hosted.structure, hosted.store, seed=0)
    assert all(p.is_meta for p in hosted.structure.model.parameters())


def test_every_module_is_initialised_by_the_model_that_owns_it():
    """A model inside a model (the text model of a multimodal one) has its own rules and its own config."""
    structure = fresh(BY_NAME["llama"]).structure
    names = {module: name for name, module in structure.model.named_modules()}
    seen = {names[module]: names[owner] for unit in structure.units for owner, module in weights._walk(structure, unit)}
    assert seen.keys() == set(names.values())
    assert seen == {name: "model" if name.startswith("model") else "" for name in seen}
