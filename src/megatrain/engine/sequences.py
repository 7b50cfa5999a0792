"""Objectives over whole sequences: sums of log-probabilities, and how sequences are told apart in rows.

[Note: sequence ids]
`batch["sequence_ids"]` (rows, T) numbers the sequences of a step at their target tokens: 0 to S - 1, none left out; elsewhere any
number. Two sequences make a group: 2p and 2p + 1 are the preferred and the rejected answer of pair p, or an example and the
answer of another example to its prompt (KTO). Every sequence lies in one row. The two of a group lie in one row too, or one in
each of the rows 2n and 2n + 1; no cut of a step separates them.

[Note: sums in fp64]
A sequence's log-probability is the sum over its tokens, in fp64. On a GPU `index_put` with `accumulate` adds in a fixed order,
and on a CPU it is serial for fp64, so the same batch gives the same bits.

Shapes: N target tokens, S sequences, P = S / 2 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatrain.engine.objective import Objective, Targets
from megatrain.errors import UserError

IDS = "sequence_ids"
REFERENCE = "reference_logprobs"
"""Key of the reference's log-probability of a sequence, (rows, T): the same number at all its targets."""


@dataclass(frozen=True)
class Sequences:
    """Sums over the sequences of a step; those that are not among the targets have zeros.

    Attributes:
        logprobs: (S,) fp64, sum over the targets of each sequence. Differentiable.
        tokens: (S,) fp64, number of its targets here: all of them, or none.
    """

    logprobs: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, logprobs_N: torch.Tensor, targets: Targets) -> Sequences:
        ids_N, count = targets.values[IDS].long(), targets.step.counts["sequences"]
        zeros_S = torch.zeros(count, dtype=torch.float64, device=logprobs_N.device)
        wide_N = logprobs_N.double()
        return cls(
            zeros_S.index_put((ids_N,), wide_N, accumulate=True),
            zeros_S.index_put((ids_N,), torch.ones_like(wide_N), accumulate=True).detach(),
        )

    @property
    def here(self) -> torch.Tensor:
        """(S,) bool, whether a sequence is among the targets."""
        return self.tokens > 0

    @property
    def means(self) -> torch.Tensor:
        """(S,) fp64, mean log-probability of a target; -1 for sequences that are not here."""
        return torch.where(self.here, self.logprobs / self.tokens.clamp(min=1), -1.0)


def spread(values_N: torch.Tensor, targets: Targets) -> torch.Tensor:
    """(S,) fp64: a number that is equal at all targets of a sequence; zero for sequences that are not here."""
    zeros_S = torch.zeros(targets.step.counts["sequences"], dtype=torch.float64, device=values_N.device)
    return zeros_S.index_put((targets.values[IDS].long(),), values_N.double())


def sequence_counts(targets: Targets) -> np.ndarray:
    """(S,) int64: target tokens of each sequence of a step (CPU).

    Raises:
        UserError: A number is negative or left out.
    """
    ids_N = targets.values[IDS].numpy()
    if len(ids_N) and int(ids_N.min()) < 0:
        raise UserError("is negative at a target token", f"batch[{IDS!r}]", "number the sequences from 0")
    tokens_S = np.bincount(ids_N)
    if len(missing := np.flatnonzero(tokens_S == 0)):
        what = f"sequence {int(missing[0])} of {len(tokens_S)} has no target token"
        raise UserError(what, f"batch[{IDS!r}]", "number the sequences of a step from 0 without gaps")
    return tokens_S


class SequenceLogprobs(Objective):
    """No loss; the metric `logprobs` is a vector: the log-probability of each sequence."""

    batch_keys = (IDS,)

    def counts(self, targets: Targets) -> Mapping[str, int]:
        return {"sequences": len(sequence_counts(targets))}

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return logprobs_N.new_zeros(()), {"logprobs": Sequences.of(logprobs_N, targets).logprobs}


class GroupObjective(Objective):
    """A loss over groups of two sequences. See [Note: sequence ids]."""

    batch_keys = (IDS,)
    per = "groups"

    def counts(self, targets: Targets) -> Mapping[str, int]:
        """`sequences`; `groups`; `first_tokens`: targets of the first sequences of all groups."""
        tokens_S = sequence_counts(targets)
        if len(tokens_S) % 2:
            what = f"numbers {len(tokens_S)} sequences, which make no pairs"
            raise UserError(what, f"batch[{IDS!r}]", "give both sequences of every pair: 2p and 2p + 1")
        return {"sequences": len(tokens_S), "groups": len(tokens_S) // 2, "first_tokens": int(tokens_S[0::2].sum())}

    def rows_together(self, targets: Targets) -> int:
        """1 if every group lies in one row, 2 if they lie in pairs of rows."""
        group_N, row_N = targets.values[IDS].numpy() // 2, targets.rows.numpy()
        first_P = np.full(int(group_N.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        last_P = np.full(len(first_P), -1, np.int64)
        np.minimum.at(first_P, group_N, row_N)
        np.maximum.at(last_P, group_N, row_N)
        if (first_P == last_P).all():
            return 1
        apart = np.flatnonzero((first_P // 2) != (last_P // 2))
        if not len(apart):
            return 2
        one = int(apart[0])
        what = f"the sequences of pair {one} lie in rows {int(first_P[one])} and {int(last_P[one])}"
        raise UserError(what, f"batch[{IDS!r}]", "put them in one row, or one in each of the rows 2n and 2n + 1")

    def example(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Every row holds a group, half of its tokens in either sequence."""
        rows, tokens = batch["input_ids"].shape
        half_T = (torch.arange(tokens) >= tokens // 2).long()
        return {**batch, IDS: 2 * torch.arange(rows)[:, None] + half_T}


def halves(values_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the first and of the second sequence of each group, (P,) each."""
    first_P, second_P = values_S.view(-1, 2).unbind(1)
    return first_P, second_P
