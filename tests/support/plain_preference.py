"""The slow side of the tests of preference losses: every sequence alone through plain Hugging Face, and the papers' formulas.

`groups` makes random groups of two sequences, `packed` and `paired` lay them out as a batch, `plain` computes loss and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from families import VOCAB

PROMPT = 4


@dataclass(frozen=True)
class One:
    """A sequence: token ids, of which those from `prompt` on are targets; `reference`: its log-probability by the reference."""

    ids: Tensor
    prompt: int
    reference: float
    good: bool = True


Group = tuple[One, One]


def groups(count: int, seed: int, longest: int = 9) -> list[Group]:
    """Pairs with a common prompt, answers of unequal lengths, and reference log-probabilities near those of a random model."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    made = []
    for _ in range(count):
        prompt = torch.randint(3, VOCAB, (PROMPT,), generator=generator)
        good = number(0, 2) == 0
        pair = []
        for _ in range(2):
            answer = torch.randint(3, VOCAB, (number(2, longest + 1),), generator=generator)
            reference = -len(answer) * (5.0 + float(torch.rand((), generator=generator)))
            pair.append(One(torch.cat([prompt, answer]), PROMPT, reference, good))
        made.append((pair[0], pair[1]))
    return made


def rows_of(rows: Sequence[Sequence[tuple[int, One]]], tokens: int, packed: bool) -> dict[str, Tensor]:
    """A batch whose rows hold (sequence id, sequence) one after another."""
    shape = (len(rows), tokens)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "document_ids", "sequence_ids")}
    batch["labels"] = torch.full(shape, -100)
    batch["reference_logprobs"] = torch.zeros(shape)
    batch["desirable"] = torch.zeros(shape, dtype=torch.bool)
    mask = torch.zeros(shape, dtype=torch.int64)
    for row, ones in enumerate(rows):
        at = 0
        for document, (number, one) in enumerate(ones):
            here = slice(at, at + len(one.ids))
            batch["input_ids"][row, here] = one.ids
            batch["labels"][row, at + one.prompt : here.stop] = one.ids[one.prompt :]
            batch["document_ids"][row, here] = document
            batch["sequence_ids"][row, here] = number
            batch["reference_logprobs"][row, here] = one.reference
            batch["desirable"][row, here] = one.good
            mask[row, here] = 1
            at = here.stop
        batch["document_ids"][row, at:] = len(ones)
    if not packed:
        del batch["document_ids"]
        batch["attention_mask"] = mask
    return batch


def packed(made: Sequence[Group], tokens: int = 48) -> dict[str, Tensor]:
    """Whole groups in rows, as many as fit."""
    rows: list[list[tuple[int, One]]] = [[]]
    for number, group in enumerate(made):
        if sum(len(one.ids) for _, one in rows[-1]) + sum(len(one.ids) for one in group) > tokens:
            rows.append([])
        rows[-1] += [(2 * number, group[0]), (2 * number + 1, group[1])]
    return rows_of(rows, tokens, packed=True)


def paired(made: Sequence[Group], tokens: int = 16) -> dict[str, Tensor]:
    """A row a sequence: the sequences of group n in the rows 2n and 2n + 1."""
    rows = [[(2 * number + side, one)] for number, group in enumerate(made) for side, one in enumerate(group)]
    return rows_of(rows, tokens, packed=False)


def of_objective(batch: dict[str, Tensor], objective: Any) -> dict[str, Tensor]:
    """The batch with the keys that the objective reads."""
    others = {"sequence_ids", "reference_logprobs", "desirable"} - set(objective.batch_keys)
    return {name: tensor for name, tensor in batch.items() if name not in others}


def logprob(model: nn.Module, one: One) -> Tensor:
    """(n,) log-probabilities of the targets of a sequence, alone in its row."""
    logits = model(input_ids=one.ids[None], use_cache=False).logits[0, one.prompt - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, one.ids[one.prompt :, None])[:, 0]


def pair_loss(losses: Callable[..., Tensor], sft_weight: float = 0.0) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """The loss of a batch of pairs, from `losses(sum c, sum r, mean c, mean r, ref c, ref r, n c, n r)`."""

    def whole(model: nn.Module, made: Sequence[Group]) -> tuple[Tensor, dict[str, float]]:
        both = [(logprob(model, chosen), logprob(model, rejected)) for chosen, rejected in made]
        each = [
            losses(c.sum(), r.sum(), c.mean(), r.mean(), g[0].reference, g[1].reference, len(c), len(r))
            for (c, r), g in zip(both, made, strict=True)
        ]
        total = torch.stack(each).mean()
        if sft_weight:
            total = total - sft_weight * torch.cat([c for c, _ in both]).mean()
        count = len(made)
        return total, {
            "logps/chosen": sum(c.sum().item() for c, _ in both) / count,
            "logps/rejected": sum(r.sum().item() for _, r in both) / count,
        }

    return whole


def dpo(beta: float, smoothing: float = 0.0) -> Callable[..., Tensor]:
    def losses(c: Tensor, r: Tensor, mc: Tensor, mr: Tensor, rc: float, rr: float, nc: int, nr: int) -> Tensor:
        h = beta * ((c - rc) - (r - rr))
        return -(1 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)

    return losses


def ipo(beta: float) -> Callable[..., Tensor]:
    def losses(c: Tensor, r: Tensor, mc: Tensor, mr: Tensor, rc: float, rr: float, nc: int, nr: int) -> Tensor:
        return ((mc - rc / nc) - (mr - rr / nr) - 1 / (2 * beta)) ** 2

    return losses


def orpo(beta: float) -> Callable[..., Tensor]:
    def losses(c: Tensor, r: Tensor, mc: Tensor, mr: Tensor, rc: float, rr: float, nc: int, nr: int) -> Tensor:
        odds = mc.exp() / (1 - mc.exp()) / (mr.exp() / (1 - mr.exp()))
        return -beta * logsigmoid(odds.log())

    return losses


def simpo(beta: float, gamma: float) -> Callable[..., Tensor]:
    def losses(c: Tensor, r: Tensor, mc: Tensor, mr: Tensor, rc: float, rr: float, nc: int, nr: int) -> Tensor:
        return -logsigmoid(beta * mc - beta * mr - gamma)

    return losses


def kto(
    beta: float, good_weight: float, bad_weight: float
) -> Callable[[nn.Module, Sequence[Group]], tuple[Tensor, dict[str, float]]]:
    def whole(model: nn.Module, made: Sequence[Group]) -> tuple[Tensor, dict[str, float]]:
        with torch.no_grad():
            others = [float(logprob(model, other).sum()) - other.reference for _, other in made]
        z = max(0.0, sum(others) / len(others))
        losses, rewards = [], {True: [], False: []}
        for one, _ in made:
            ratio = logprob(model, one).sum() - one.reference
            losses.append(
                good_weight * (1 - torch.sigmoid(beta * (ratio - z)))
                if one.good
                else bad_weight * (1 - torch.sigmoid(beta * (z - ratio)))
            )
            rewards[one.good].append(beta * ratio.item())
        chosen, rejected = (sum(found) / len(found) if found else math.nan for found in (rewards[True], rewards[False]))
        return torch.stack(losses).mean(), {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "kl": z,
        }

    return whole
