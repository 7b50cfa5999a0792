"""Routers of a mixture of experts: the auxiliary loss of their family, and what they choose.

[Note: the auxiliary loss]
With `output_router_logits`, Hugging Face adds to the mean cross entropy
    coefficient * aux_loss,    aux_loss = E * sum over experts e of (C_e / R) * (P_e / R)
C_e: how often expert e is among the k most probable of a token; P_e: the sum of its probabilities; R: tokens times routers. The
sums run over all tokens that are not padding, and over the routers of all layers together. The counts have no gradient, so
d aux_loss / d P_e = E * C_e / R^2, one number for all tokens of the step, as soon as all tokens of the step have been routed.
So a layer returns its two sums (2, E) beside its hidden states, and its backward starts from that number as well. Sums add up
over microbatches, accumulation steps, layers and ranks: the result does not depend on how a step is cut.

[Note: recording routers]
Which modules are routers, and which of their outputs are logits, is what Hugging Face's own recorder reads
(`_can_record_outputs`). Experts are recognized by their arguments. Forward hooks on both hand what they see to the `RouterProbe`,
which reduces it to sums inside the layer's own code, compiled or not.

[Note: balancing by biases]
Families like DeepSeek-V3 add a bias to the scores by which a router chooses, not to the weights of the chosen experts. It has no
gradient. The rule it was made for: after each step, the bias of an expert with less load than the mean of its layer rises by the
update speed, that of one with more falls by it. transformers does not train it.

Shapes: N tokens (of a microbatch), E experts, K experts per token.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.output_capturing import OutputRecorder

from megatrain.errors import UserError

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of causal language models that hold the coefficient."""
FORMULA = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Parameters of the families' `load_balancing_loss_func` in [Note: the auxiliary loss]; other formulas take others."""
CHOSEN = (["top_k_index"], ["router_indices"])
"""Names of the argument (N, K) of experts that says which are chosen."""
KEY = "model.router_aux_loss"
BIAS, BIAS_KEY = "e_score_correction_bias", "model.router_bias_update_speed"
"""See [Note: balancing by biases]."""


@dataclass(frozen=True)
class RouterLoss:
    """The auxiliary loss of a model. See [Note: the auxiliary loss].

    Attributes:
        coefficient: Factor on it in the loss of a step.
        experts: E.
        top_k: K.
    """

    coefficient: float
    experts: int
    top_k: int


def router_loss(model: Any, setting: bool | float | None) -> RouterLoss | None:
    """The auxiliary loss that a model is to be trained with.

    Args:
        model: The causal language model.
        setting: None follows the model's config (`output_router_logits`, as Hugging Face does), False is off, True is on with the
            model's coefficient, a number is on with this coefficient.

    Raises:
        UserError: The loss is asked for, and the family has none or one of another formula.
    """
    on = bool(getattr(model.config, "output_router_logits", False)) if setting is None else setting is not False
    if not on:
        return None
    kind = model.config.model_type
    formula = getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)
    coefficient = next((getattr(model, name) for name in COEFFICIENTS if hasattr(model, name)), None)
    if formula is None or coefficient is None:
        if setting is None:  # Hugging Face adds nothing either
            return None
        raise UserError(
            f"the {kind} family has no auxiliary loss of its routers in transformers", KEY, "leave the key out"
        )
    if tuple(inspect.signature(formula).parameters) != FORMULA:
        raise UserError(
            f"the auxiliary loss of the {kind} family has a formula that is not supported",
            KEY,
            f"set {KEY}: false to train without it",
        )
    given = coefficient if setting is None or setting is True else setting
    return RouterLoss(float(given), model.num_experts, model.num_experts_per_tok)


def with_router_loss(model: Any, loss: RouterLoss | None) -> Any:
    """Let a plain model compute this auxiliary loss, or none: for comparisons. Returns the model."""
    model.config.output_router_logits = loss is not None
    if loss is not None:
        setattr(model, next(name for name in COEFFICIENTS if hasattr(model, name)), loss.coefficient)
    return model


class Routed(NamedTuple):
    """What the routers of a layer did with some tokens, padding left out.

    Attributes:
        balance: (2, E): how often the auxiliary loss counts each expert, and the sum of its probabilities, which is
            differentiable. None: without the loss, or in a layer without routers.
        load: (E,): how many tokens each expert computes. None: the layer has no experts that can be watched.
    """

    balance: torch.Tensor | None
    load: torch.Tensor | None


class RouterProbe:
    """Sees what the routers of the layer in progress do. See [Note: recording routers].

    Args:
        loss: The auxiliary loss, or None: loads only.
    """

    def __init__(self, loss: RouterLoss | None):
        self.loss = loss
        self._logits: list[torch.Tensor] | None = None
        self._choices: list[tuple[torch.Tensor, int]] | None = None

    def begin(self) -> None:
        """Record from here on."""
        self._logits, self._choices = [], []

    def forget(self) -> None:
        """Record no longer."""
        self._logits = self._choices = None

    def end(self, mask_N: torch.Tensor) -> Routed:
        """What has been seen since `begin`. `mask_N` (fp32) is 0 where a token is padding."""
        logits, choices = self._logits, self._choices
        self._logits = self._choices = None
        assert logits is not None and choices is not None
        balance = load = None
        if self.loss is not None:
            for logits_NE in logits:
                one = balance_of(logits_NE, mask_N, self.loss)
                balance = one if balance is None else balance + one
        for index_NK, experts in choices:
            # A module in chunks of tokens sees parts of them, which no mask belongs to.
            if index_NK.shape[0] == mask_N.shape[0]:
                one = counts_of(index_NK, mask_N, experts)
                load = one if load is None else load + one
        return Routed(balance, load)

    def watch(self, router: nn.Module, index: int) -> None:
        """Record a router's logits, output `index`, whenever it runs."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._logits is not None:
                self._logits.append(output[index] if isinstance(output, tuple) else output)

        router.register_forward_hook(hook)

    def watch_experts(self, module: nn.Module) -> None:
        """Record the experts that tokens are sent to, whenever they run."""
        experts = int(module.num_experts)  # type: ignore[arg-type]

        def hook(module: nn.Module, args: Any) -> None:
            if self._choices is not None:
                self._choices.append((args[1], experts))

        module.register_forward_pre_hook(hook)


def counts_of(index_NK: torch.Tensor, mask_N: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) fp32, how often each expert occurs at tokens that are not padding."""
    index_NK = torch.where(mask_N[:, None] > 0, index_NK, -1)  # -1 is in no bin
    # As in Hugging Face: unlike bincount it does not wait for the device; integers are exact and deterministic there.
    kind = torch.int32 if index_NK.device.type == "cuda" else torch.float32
    return torch.histc(index_NK.reshape(-1).to(kind), bins=experts, min=0, max=experts).float()


def balance_of(logits_NE: torch.Tensor, mask_N: torch.Tensor, loss: RouterLoss) -> torch.Tensor:
    """(2, E), see `Routed.balance`: counts and sums of probabilities, as Hugging Face computes them."""
    probabilities_NE = F.softmax(logits_NE, dim=-1)
    index_NK = probabilities_NE.detach().topk(loss.top_k, dim=-1).indices
    wide_NE = probabilities_NE if probabilities_NE.dtype == torch.float64 else probabilities_NE.float()
    sums_E = (wide_NE * mask_N[:, None]).sum(dim=0)
    return torch.stack([counts_of(index_NK, mask_N, loss.experts).to(sums_E.dtype), sums_E])


def routers_of(base: nn.Module, layer: nn.Module, name: str) -> list[tuple[nn.Module, int]]:
    """The routers inside a layer, each with the index of its logits among its outputs.

    Args:
        base: The base model, which says what Hugging Face records.
        layer: One of its layers.
        name: The layer's name in the base model.
    """
    recorders = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    found = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        if not isinstance(recorder, OutputRecorder) or (target := recorder.target_class) is None:
            continue
        wanted = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
        for path, module in layer.named_modules():
            if isinstance(module, target) and wanted in f".{name}.{path}.":
                found.append((module, recorder.index))
    return found


def experts_of(layer: nn.Module) -> list[nn.Module]:
    """The modules inside a layer that hold experts and get the chosen ones as their second argument."""
    return [
        module
        for module in layer.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        and list(inspect.signature(module.forward).parameters)[1:2] in CHOSEN
    ]


def correction_biases(model: nn.Module, layers_name: str) -> dict[int, str]:
    """Full names of the routers' correction biases by layer, of those that are buffers."""
    prefix = layers_name + "."
    return {
        int(name[len(prefix) :].split(".", 1)[0]): name
        for name, _ in model.named_buffers()
        if name.startswith(prefix) and name.endswith(BIAS)
    }


def trained_biases(model: Any, layers_name: str, speed: float | None) -> dict[int, str]:
    """The correction biases that training updates, by layer; empty if that is off.

    Raises:
        UserError: It is on, and the family has no such buffers.
    """
    if speed is None:
        return {}
    found = correction_biases(model, layers_name)
    if not found:
        raise UserError(
            f"the {model.config.model_type} family has no {BIAS} among its buffers", BIAS_KEY, "leave the key out"
        )
    return found


def balance_bias(bias_E: torch.Tensor, load_E: torch.Tensor, speed: float) -> None:
    """Update a correction bias in place by the load of a step. See [Note: balancing by biases]."""
    bias_E += speed * torch.sign(load_E.mean() - load_E).to(bias_E.dtype)


def record(
    probe: RouterProbe, mask_N: torch.Tensor, call: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[Any, Routed]:
    """`call(*arguments)`, and what the routers inside did."""
    probe.begin()
    try:
        output = call(*arguments)
    except BaseException:
        probe.forget()
        raise
    return output, probe.end(mask_N)
