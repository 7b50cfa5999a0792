"""Losses over preferred and rejected answers: DPO, IPO, ORPO, SimPO; and KTO over answers labelled good or bad.

With the log-probability of an answer y to its prompt, log pi(y), and its mean over the answer's tokens:

    DPO    -log sigmoid(beta h), h = log pi(c)/ref(c) - log pi(r)/ref(r)                       arXiv 2305.18290, eq. 7
           with label smoothing e: (1 - e) times that, + e times -log sigmoid(-beta h)         "conservative DPO"
    IPO    (h - 1 / (2 beta))^2, h of means over tokens                                        arXiv 2310.12036, eq. 17
    ORPO   -mean log pi(c) - beta log sigmoid(log odds(c) - log odds(r))                       arXiv 2403.07691, eq. 6
           odds(y) = p / (1 - p), p = exp(mean log pi(y))
    SimPO  -log sigmoid(beta (mean log pi(c) - mean log pi(r)) - gamma)                        arXiv 2405.14734, eq. 6
    KTO    w (1 - sigmoid(beta (log pi(y)/ref(y) - z))), for a bad answer the sign turned      arXiv 2402.01306, eq. 8
           z, an estimate of the divergence: the mean of log pi(y')/ref(y') over answers y' of other prompts, at least 0

The mean is over the pairs (KTO: examples) of the step. IPO over means and the rewards follow TRL's trainers. ORPO's first term
and `sft_weight` are the mean cross entropy of the preferred answers' tokens over the step, without their prompts.

Rewards: beta log pi(y)/ref(y); without a reference beta times the mean log-probability.

Shapes: N target tokens, S sequences, P = S / 2 groups; see `sequences.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from megatrain.data.samples import DataKind
from megatrain.engine.objective import StepTotals, Targets
from megatrain.engine.sequences import IDS, REFERENCE, GroupObjective, Sequences, halves, spread

DESIRABLE = "desirable"
"""Key of KTO's labels, (rows, T): whether the answer is a good one, at all its targets."""

Metrics = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Pairs:
    """What a pair loss reads, (P,) fp64 each; pairs that are not here have finite numbers of no meaning.

    Attributes:
        chosen, rejected: Log-probability of each answer.
        mean_chosen, mean_rejected: The same per target token.
        ratio_chosen, ratio_rejected: Log-probability over the reference's; without a reference `chosen`, `rejected`.
        tokens_chosen, tokens_rejected: Targets of each answer, at least 1.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    mean_chosen: torch.Tensor
    mean_rejected: torch.Tensor
    ratio_chosen: torch.Tensor
    ratio_rejected: torch.Tensor
    tokens_chosen: torch.Tensor
    tokens_rejected: torch.Tensor


class PairObjective(GroupObjective):
    """A loss over pairs of a preferred (chosen) and a rejected answer.

    Args:
        beta: Strength of the preference; see the formulas.
        sft_weight: Weight of the mean cross entropy of the preferred answers, which is added.
    """

    data: ClassVar[DataKind] = "pairs"
    metric_per: Mapping[str, str] = {"nll": "first_tokens"}

    def __init__(self, beta: float, sft_weight: float = 0.0):
        self.beta, self.sft_weight = beta, sft_weight

    @abstractmethod
    def losses(self, pairs: Pairs) -> torch.Tensor:
        """(P,) loss of each pair."""

    @abstractmethod
    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """(P,) rewards of the preferred and of the rejected answers."""

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Metrics]:
        sums = Sequences.of(logprobs_N, targets)
        here_P = halves(sums.here)[0]
        ratios_S = sums.logprobs
        if self.needs_reference:
            ratios_S = ratios_S - spread(targets.values[REFERENCE], targets)
        pairs = Pairs(*halves(sums.logprobs), *halves(sums.means), *halves(ratios_S), *halves(sums.tokens.clamp(min=1)))
        total = torch.where(here_P, self.losses(pairs), 0.0).sum()
        nll = -torch.where(here_P, pairs.chosen, 0.0).sum()
        if self.sft_weight:  # a mean over tokens, where the engine divides by the pairs of the step
            counts = targets.step.counts
            total = total + self.sft_weight * nll * (counts["groups"] / counts["first_tokens"])
        with torch.no_grad():
            chosen_P, rejected_P = self.rewards(pairs)
            found = {
                "rewards/chosen": chosen_P,
                "rewards/rejected": rejected_P,
                "rewards/margins": chosen_P - rejected_P,
                "rewards/accuracies": (chosen_P > rejected_P).double(),
                "logps/chosen": pairs.chosen,
                "logps/rejected": pairs.rejected,
            }
            metrics = {name: torch.where(here_P, value_P, 0.0).sum() for name, value_P in found.items()}
        return total, ({**metrics, "nll": nll} if self.sft_weight else metrics)


class _Referenced(PairObjective):
    """A pair loss that compares with the initial model."""

    needs_reference = True
    batch_keys = (IDS, REFERENCE)

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.beta * pairs.ratio_chosen, self.beta * pairs.ratio_rejected

    def example(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        made = super().example(batch)
        return None if made is None else {**made, REFERENCE: torch.zeros(batch["input_ids"].shape)}


class DPO(_Referenced):
    """Direct preference optimisation.

    Args:
        beta, sft_weight: As for `PairObjective`.
        label_smoothing: Assumed share of pairs whose answers are the wrong way round, below 0.5.
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, sft_weight: float = 0.0):
        super().__init__(beta, sft_weight)
        self.label_smoothing = label_smoothing

    def losses(self, pairs: Pairs) -> torch.Tensor:
        return smoothed(self.beta * (pairs.ratio_chosen - pairs.ratio_rejected), self.label_smoothing)


class IPO(_Referenced):
    """Identity preference optimisation, over means per token."""

    def __init__(self, beta: float = 0.1, sft_weight: float = 0.0):
        super().__init__(beta, sft_weight)

    def losses(self, pairs: Pairs) -> torch.Tensor:
        gap_P = pairs.ratio_chosen / pairs.tokens_chosen - pairs.ratio_rejected / pairs.tokens_rejected
        return (gap_P - 1 / (2 * self.beta)) ** 2


class _Unreferenced(PairObjective):
    """A pair loss of means per token, without a reference."""

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.beta * pairs.mean_chosen, self.beta * pairs.mean_rejected


class ORPO(_Unreferenced):
    """Odds ratio preference optimisation: cross entropy of the preferred answers, and the ratio of the answers' odds."""

    def __init__(self, beta: float = 0.1):
        super().__init__(beta, sft_weight=1.0)

    def losses(self, pairs: Pairs) -> torch.Tensor:
        return -self.beta * logsigmoid(log_odds(pairs.mean_chosen) - log_odds(pairs.mean_rejected))


class SimPO(_Unreferenced):
    """Simple preference optimisation.

    Args:
        beta, sft_weight: As for `PairObjective`.
        gamma: Margin of the rewards that is aimed at.
        label_smoothing: As for `DPO`.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, sft_weight: float = 0.0):
        super().__init__(beta, sft_weight)
        self.gamma, self.label_smoothing = gamma, label_smoothing

    def losses(self, pairs: Pairs) -> torch.Tensor:
        margin_P = self.beta * (pairs.mean_chosen - pairs.mean_rejected) - self.gamma
        return smoothed(margin_P, self.label_smoothing)


class KTO(GroupObjective):
    """Kahneman-Tversky optimisation: single answers labelled good or bad.

    The second sequence of a group is another example's answer to the same prompt; it has no gradient.

    Args:
        beta: Strength of the preference.
        desirable_weight, undesirable_weight: Weights of the losses of good and bad answers.
    """

    data: ClassVar[DataKind] = "labels"
    needs_reference = True
    has_statistics = True
    batch_keys = (IDS, REFERENCE, DESIRABLE)
    metric_per: Mapping[str, str] = {
        "rewards/chosen": "good",
        "logps/chosen": "good",
        "rewards/rejected": "bad",
        "logps/rejected": "bad",
    }

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0):
        self.beta = beta
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def counts(self, targets: Targets) -> Mapping[str, int]:
        """As `GroupObjective.counts`, and `good` and `bad`: examples by their label."""
        found = super().counts(targets)
        good = int(spread(targets.values[DESIRABLE], _knowing(targets, found))[0::2].sum())
        return {**found, "good": good, "bad": found["groups"] - good}

    def statistics(self, logprobs_N: torch.Tensor, targets: Targets) -> Metrics:
        """`ratios`: sum over the answers of other examples of log pi / ref."""
        sums = Sequences.of(logprobs_N, targets)
        ratios_P = halves(sums.logprobs - spread(targets.values[REFERENCE], targets))[1]
        return {"ratios": ratios_P.sum()}  # zeros where a sequence is not here

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Metrics]:
        assert targets.step.statistics is not None
        ratios = torch.as_tensor(targets.step.statistics["ratios"], dtype=torch.float64, device=logprobs_N.device)
        divergence = (ratios / targets.step.counts["groups"]).clamp(min=0)
        sums = Sequences.of(logprobs_N, targets)
        here_P, logprobs_P = halves(sums.here)[0], halves(sums.logprobs)[0]
        ratio_P = logprobs_P - halves(spread(targets.values[REFERENCE], targets))[0]
        good_P = halves(spread(targets.values[DESIRABLE], targets))[0] > 0
        sign_P = torch.where(good_P, 1.0, -1.0)
        weight_P = torch.where(good_P, self.desirable_weight, self.undesirable_weight)
        losses_P = weight_P * (1 - torch.sigmoid(sign_P * self.beta * (ratio_P - divergence)))
        with torch.no_grad():
            chosen_P, rejected_P = here_P & good_P, here_P & ~good_P
            metrics = {
                "rewards/chosen": self.beta * torch.where(chosen_P, ratio_P, 0.0).sum(),
                "rewards/rejected": self.beta * torch.where(rejected_P, ratio_P, 0.0).sum(),
                "logps/chosen": torch.where(chosen_P, logprobs_P, 0.0).sum(),
                "logps/rejected": torch.where(rejected_P, logprobs_P, 0.0).sum(),
                "kl": divergence * here_P.sum(),
            }
        return torch.where(here_P, losses_P, 0.0).sum(), metrics

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """With `rewards/margins`, the difference of the mean rewards, where there are answers of both kinds."""
        made = dict(metrics)
        if "rewards/chosen" in made and "rewards/rejected" in made:
            made["rewards/margins"] = made["rewards/chosen"] - made["rewards/rejected"]
        return made

    def example(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        made = super().example(batch)
        shape = batch["input_ids"].shape
        more = {REFERENCE: torch.zeros(shape), DESIRABLE: torch.ones(shape, dtype=torch.bool)}
        return None if made is None else {**made, **more}


def smoothed(margin_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """(P,): -log sigmoid of a margin, where a share of the pairs is assumed to be the wrong way round."""
    losses_P = -logsigmoid(margin_P)
    if label_smoothing:
        losses_P = (1 - label_smoothing) * losses_P - label_smoothing * logsigmoid(-margin_P)
    return losses_P


def log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(mean log-probability) < 1."""
    return mean_logprobs - torch.log(-torch.expm1(mean_logprobs))


def _knowing(targets: Targets, counts: Mapping[str, int]) -> Targets:
    """The targets of a whole step, with its counts."""
    return replace(targets, step=StepTotals({**targets.step.counts, **counts}))
