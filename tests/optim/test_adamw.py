"""Hyper-parameters are checked at construction and apply to the parameters that they are meant for."""

import math

import numpy as np
import pytest

from megatrain.errors import UserError
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import ParamGroup, Segment, hyper_parameters, segments_of, unmatched_groups

LAYER = [
    ("model.layers.0.self_attn.q_proj.weight", (8, 8), 0, 64),
    ("model.layers.0.self_attn.q_proj.bias", (8,), 64, 8),
    ("model.layers.0.input_layernorm.weight", (8,), 128, 8),
    ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 8), 192, 64),
    ("model.layers.0.mlp.router.weight", (2, 8), 256, 16),
]


def test_norms_and_biases_are_not_decayed_by_default() -> None:
    segments = segments_of(LAYER, AdamW(weight_decay=0.1))
    assert segments == (Segment(0, 64, 0.1, 1.0), Segment(64, 192, 0.0, 1.0), Segment(192, 272, 0.1, 1.0))


def test_segments_cover_every_element_once_with_padding_behind_its_tensor() -> None:
    segments = segments_of(LAYER, AdamW(groups=(ParamGroup("bias", lr_scale=2.0), ParamGroup("router", 0.0))))
    assert [(s.start, s.end) for s in segments] == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 272)]


def test_the_first_group_that_matches_the_full_name_holds() -> None:
    optim = AdamW(
        weight_decay=0.1,
        groups=(
            ParamGroup(r"layers\.0\..*layernorm", weight_decay=0.5),
            ParamGroup(r"layernorm|q_proj", lr_scale=0.1),
            ParamGroup(r"router", weight_decay=0.0, lr_scale=0.0),
        ),
    )
    assert segments_of(LAYER, optim) == (
        Segment(0, 64, 0.1, 0.1),  # keeps the decay of a matrix
        Segment(64, 128, 0.0, 0.1),  # keeps the decay of a bias
        Segment(128, 192, 0.5, 1.0),
        Segment(192, 256, 0.1, 1.0),
        Segment(256, 272, 0.0, 0.0),
    )


def test_groups_without_parameters_are_reported() -> None:
    misspelt, hidden = ParamGroup("q_porj"), ParamGroup("q_proj.weight")
    optim = AdamW(groups=(ParamGroup("q_proj"), misspelt, hidden, ParamGroup("router")))
    assert unmatched_groups([name for name, *_ in LAYER], optim) == [misspelt, hidden]


def test_overlapping_tensors_are_refused() -> None:
    with pytest.raises(AssertionError, match="overlaps"):
        segments_of([("a", (4, 4), 0, 16), ("b", (4, 4), 8, 16)], AdamW())


def test_bad_hyper_parameters_are_all_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        AdamW(learning_rate=-1.0, betas=(0.9, 1.0), eps=0.0, weight_decay=math.nan, max_grad_norm=0.0)
    for name in ("learning_rate = -1.0", r"betas[1] = 1.0", "eps = 0.0", "weight_decay = nan", "max_grad_norm = 0.0"):
        assert name in str(error.value)
    assert str(error.value).startswith("optim: ")


@pytest.mark.parametrize(
    "bad",
    [
        {"learning_rate": "1e-5"},
        {"learning_rate": math.inf},
        {"learning_rate": True},
        {"betas": (0.9, 0.99, 0.999)},
        {"betas": (-0.1, 0.99)},
        {"eps": 1e-40},  # zero in fp32
        {"weight_decay": -0.1},
        {"max_grad_norm": -1.0},
    ],
)
def test_each_bad_hyper_parameter_is_a_user_error(bad: dict) -> None:
    with pytest.raises(UserError):
        AdamW(**bad)


@pytest.mark.parametrize(
    "bad", [{"pattern": "("}, {"pattern": "a", "weight_decay": -1.0}, {"pattern": "a", "lr_scale": -1.0}]
)
def test_each_bad_group_is_a_user_error_that_names_it(bad: dict) -> None:
    with pytest.raises(UserError, match=r"optim\.groups"):
        ParamGroup(**bad)


def test_zero_rate_no_decay_and_no_clipping_are_allowed() -> None:
    AdamW(learning_rate=0, betas=(0.0, 0.0), weight_decay=0, max_grad_norm=None)


def test_coefficients_are_computed_in_float64_and_rounded_once() -> None:
    optim = AdamW(learning_rate=3e-5, betas=(0.9, 0.95), weight_decay=0.1)
    scalars = optim.coefficients(step=3, gradient_scale=0.25).scalars(Segment(0, 1, 0.1, 0.5))
    assert {type(scalar) for scalar in scalars[:-1]} == {np.float32}
    assert scalars.decay == np.float32(1 - 1.5e-5 * 0.1)
    assert scalars.step_size == np.float32(1.5e-5 / (1 - 0.9**3))
    assert scalars.bias_correction2_sqrt == np.float32(math.sqrt(1 - 0.95**3))
    assert scalars.one_minus_beta2 == np.float32(1 - 0.95)
    assert scalars.gradient_scale == 0.25
    assert optim.coefficients(1, learning_rate=1.0).learning_rate == 1.0


def test_biases_and_norms_with_two_dimensions_are_not_decayed() -> None:
    """The biases of experts, (experts, width), of gates, (heads, width), and norms of each head, (heads, width)."""
    optim = AdamW(weight_decay=0.1)
    undecayed = (
        "model.layers.0.mlp.experts.gate_up_proj_bias",
        "model.layers.1.temporal_block.rg_lru.input_gate_bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.input_layernorm.weight",
        "transformer.h.0.ln_1.weight",
        "model.norm.weight",
        "layers.0.norm1.weight",
    )
    decayed = (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.embed_tokens.weight",
        "layers.0.normalizer_proj.weight",
    )
    assert {hyper_parameters(name, 2, optim)[0] for name in undecayed} == {0.0}
    assert {hyper_parameters(name, 2, optim)[0] for name in decayed} == {0.1}
    assert hyper_parameters("a.scale", 2, optim, {"a.scale"}) == (0.0, 1.0)
    assert hyper_parameters("a.scale", 1, optim) == (0.0, 1.0)
    group = AdamW(weight_decay=0.1, groups=(ParamGroup("gate_up_proj_bias", weight_decay=0.3),))
    assert hyper_parameters(undecayed[0], 2, group) == (0.3, 1.0), "a group may ask for it"
