"""The search: the fastest predicted step that fits. Small, because what can be decided by rule is decided by rule.

Tried are: how many early layers are resident, which edges are, windows, chunk rows, tokens of a head chunk. For each of these
the rest follows: layer inputs are offloaded as far as they must be, or all of them; and device memory that is left is filled with
activations, first selective ones (they save most per byte), then whole ones; late layers first, because these give theirs back
first. Where rows are so long that MLPs are computed in chunks of tokens, attention is most of the work, and what is kept is what
attention gave. The number of resident layers is tried coarsely, then finely around the best. More windows are tried only where
fewer leave something to gain. Of plans that differ by less than the prediction can tell, the one with more resident units is
taken: it leans less on the link and on the CPU.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain.machine.machine import Machine
from megatrain.planner.choice import Caps, Choice, Options, Policy, StepSize
from megatrain.planner.memory import device_peak, host_lines
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.timeline import Timeline, simulate

CHUNK_TOKENS = (32768, 16384, 8192, 4096)
MLP_CHUNK_TOKENS = 16384
LONG_TOKENS = 65536
"""A layer that computes at least so many tokens together computes its MLP in chunks."""
MOST_WINDOWS = 16
COARSE_STEPS = 8
AS_GOOD = 1.004
"""Plans within this factor of the fastest are as good."""
ALL_RESIDENT_AS_GOOD = 1.03
HOST_SHARE = 0.9
"""Choices are compared at so much of the host's AdamW rate: the loader, a save and whoever else is there take from cores and
memory. At all of it, the choice would be the one whose updates end just in time, and wait whenever they do not."""


@dataclass(frozen=True)
class Candidate:
    """A choice that fits, with its predicted step."""

    choice: Choice
    timeline: Timeline


class Search:
    """One search.

    Args:
        shape, machine, step, caps, options: As for `plan`.
    """

    def __init__(self, shape: ModelShape, machine: Machine, step: StepSize, caps: Caps, options: Options):
        self.shape, self.machine, self.step, self.caps, self.options = shape, machine, step, caps, options

    def best(self) -> Candidate | None:
        """The fastest choice that fits, None if nothing does."""
        depth = self.shape.depth
        stride = max(1, depth // COARSE_STEPS)
        coarse = sorted({*range(0, depth + 1, stride), depth})
        found: list[Candidate] = []
        for accumulation_steps in self._windows():
            found += [c for layers in coarse for c in self._with_residents(layers, accumulation_steps)]
            if not found and accumulation_steps == 1:  # what fits may lie between two coarse points
                between = (layers for layers in range(depth + 1) if layers not in coarse)
                found += itertools.islice(
                    (c for layers in between for c in self._with_residents(layers, accumulation_steps)), 50
                )
            if found and self._little_to_gain(min(found, key=_seconds)):
                break
        if not found:
            return None
        found.sort(key=_seconds)
        near = {
            (n, c.choice.accumulation_steps) for c in found[:3] for n in self._around(c.choice.resident_layers, stride)
        }
        found += [
            c
            for layers, accumulation_steps in near
            if layers not in coarse
            for c in self._with_residents(layers, accumulation_steps)
        ]
        choice = self._preferred(found).choice
        return Candidate(choice, self._timeline(choice))

    def _timeline(self, choice: Choice, host_share: float = 1.0) -> Timeline:
        return simulate(self.shape, self.machine, self.step, self.options, choice, host_share)

    def any_fits(self) -> bool:
        """Whether anything fits, without looking for the fastest."""
        return any(self._filled(base) is not None for base in self._all_bases())

    def leanest(self) -> Choice:
        """The choice that comes nearest to fitting, for the message that nothing does: the device first, then the host."""

        def missing(choice: Choice) -> tuple[int, int, int]:
            host = sum(host_lines(self.shape, self.step, self.options, choice).values()) - self.caps.host_bytes
            device = device_peak(self.shape, self.step, self.options, choice).nbytes - self.caps.device_bytes
            return max(0, device), max(0, host), choice.accumulation_steps

        return min((self._offloaded(base) or base for base in self._all_bases()), key=missing)

    def _all_bases(self) -> Iterator[Choice]:
        """Of every number of resident layers, up to some forty of them."""
        depth = self.shape.depth
        counts = sorted({*range(0, depth + 1, 1 + depth // 40), depth})
        return (
            base
            for accumulation_steps in self._windows()
            for layers in counts
            for base in self._bases(layers, accumulation_steps)
        )

    def _around(self, layers: int, stride: int) -> range:
        return range(max(0, layers - stride + 1), min(self.shape.depth, layers + stride - 1) + 1)

    def _little_to_gain(self, best: Candidate) -> bool:
        """More windows keep more activations per window; that is worth trying while layers are recomputed or inputs offloaded."""
        return "recompute" not in best.choice.policies or self.options.policy == "recompute"

    def _preferred(self, found: list[Candidate]) -> Candidate:
        fastest = min(map(_seconds, found))
        whole = [c for c in found if c.choice.resident_elements(self.shape) == self.shape.parameters]
        if whole and min(map(_seconds, whole)) <= ALL_RESIDENT_AS_GOOD * fastest:
            return min(whole, key=_seconds)
        as_good = [c for c in found if _seconds(c) <= AS_GOOD * fastest]
        return max(
            as_good,
            key=lambda c: (
                -c.choice.accumulation_steps,
                -c.choice.offloaded,
                c.choice.resident_elements(self.shape),
                -_seconds(c),
            ),
        )

    @property
    def _may_offload(self) -> bool:
        options = self.options
        return options.offload != "off" and options.segment == 1

    @property
    def _may_reside(self) -> bool:
        return self.options.gradient_plane and self.options.compute != "fp16"

    def _with_residents(self, layers: int, accumulation_steps: int) -> Iterator[Candidate]:
        for base in self._bases(layers, accumulation_steps):
            filled = self._filled(base)
            if filled is None:
                continue
            yield Candidate(filled, self._timeline(filled, HOST_SHARE))
            if self._may_offload and not filled.offloaded and set(filled.policies) != {"keep"}:
                lighter = self._filled(replace(base, offloaded=self.shape.depth))
                if lighter is not None:
                    yield Candidate(lighter, self._timeline(lighter, HOST_SHARE))

    def _bases(self, layers: int, accumulation_steps: int) -> Iterator[Choice]:
        """Every way to cut the step and to place the edges, with nothing kept beside what the user asked to keep."""
        options, shape = self.options, self.shape
        if layers and not self._may_reside:
            return
        policy: Policy = "recompute" if options.policy == "auto" else options.policy
        embedding_choices = (False, True) if self._may_reside and shape.embedding else (False,)
        head_choices = (False, True) if self._may_reside and shape.head else (False,)
        cuts = itertools.product(
            embedding_choices, head_choices, self._chunk_rows(accumulation_steps), self._head_tokens(accumulation_steps)
        )
        for embedding, head, microbatch_rows, head_tokens in cuts:
            yield Choice(
                layers,
                embedding,
                head,
                (policy,) * shape.depth,
                0,
                accumulation_steps,
                microbatch_rows,
                head_tokens,
                self._mlp_chunk(accumulation_steps, microbatch_rows),
            )

    def _mlp_chunk(self, accumulation_steps: int, microbatch_rows: int) -> int | None:
        """Tokens of an MLP's chunk: only where a layer computes so many that chunks cost next to nothing."""
        rows = -(-self.step.rows // accumulation_steps)
        tokens = -(-rows // -(-rows // microbatch_rows)) * self.step.tokens
        if self.options.policy in ("keep", "selective", "keep_mlp") or not any(
            c.token_wise_parameters for c in self.shape.costs
        ):
            return None
        if self.options.mlp_chunk_tokens is not None:
            return self.options.mlp_chunk_tokens
        return MLP_CHUNK_TOKENS if tokens >= LONG_TOKENS else None

    def _windows(self) -> list[int]:
        if self.options.accumulation_steps is not None or not self.options.gradient_plane:
            return [min(self.options.accumulation_steps or 1, self.step.rows)]
        return [w for w in (1, 2, 4, 8, MOST_WINDOWS) if w <= self.step.rows]

    def _chunk_rows(self, accumulation_steps: int) -> list[int]:
        rows = -(-self.step.rows // accumulation_steps)
        if self.options.microbatch_rows is not None:
            return [min(self.options.microbatch_rows, rows)]
        return sorted({min(rows, max(1, tokens // self.step.tokens)) for tokens in CHUNK_TOKENS}, reverse=True)

    def _head_tokens(self, accumulation_steps: int) -> list[int]:
        """A chunk's logits weigh no more than one more copy of the head's gradient while it has at most D tokens."""
        tokens = -(-self.step.rows // accumulation_steps) * self.step.tokens
        if self.options.head_chunk_tokens is not None:
            return [self.options.head_chunk_tokens]
        width = 1 << (self.shape.hidden.bit_length() - 1)
        return sorted({min(tokens, max(1024, width)), min(tokens, 8192)}, reverse=True)

    def _fits(self, choice: Choice) -> bool:
        return device_peak(self.shape, self.step, self.options, choice).nbytes <= self.caps.device_bytes

    def _fits_host(self, choice: Choice) -> bool:
        return sum(host_lines(self.shape, self.step, self.options, choice).values()) <= self.caps.host_bytes

    def _filled(self, base: Choice) -> Choice | None:
        """The base with as few offloaded inputs as it needs and as many kept activations as fit; None if it does not fit."""
        if not self._fits_host(base):
            return None
        if base.mlp_chunk_tokens is not None and self.options.policy == "auto" and self.options.segment == 1:
            return self._attention_kept(base)
        if self.options.offload == "on" or not self._fits(base):
            offloaded = self._offloaded(base)
            return offloaded if offloaded is not None and self._fits_host(offloaded) else None
        if self.options.policy != "auto" or self.options.segment > 1:
            return base
        depth = self.shape.depth
        if not self.options.compiled:
            return _most(depth, lambda n: _policies(base, keep=n), self._fits)
        filled = _most(depth, lambda n: _policies(base, selective=n), self._fits)
        if "recompute" in filled.policies:
            return filled
        return _most(depth, lambda n: _policies(base, selective=depth - n, keep=n), self._fits)

    def _attention_kept(self, base: Choice) -> Choice | None:
        """The base with the attention of as many late layers kept as fit; inputs of others go to the host where that needs it."""

        def with_kept(count: int) -> Choice | None:
            choice = _policies(base, attention=count)
            if self.options.offload == "on" or not self._fits(choice):
                found = self._offloaded(choice)
                return found if found is not None and self._fits_host(found) else None
            return choice

        most = bisect.bisect_left(range(1, self.shape.depth + 1), True, key=lambda n: with_kept(n) is None)
        return with_kept(most)

    def _offloaded(self, base: Choice) -> Choice | None:
        """The base with as many offloaded inputs as the device needs, None if that is not enough; the host is not asked."""
        layers = self.shape.depth
        if not self._may_offload or not self._fits(replace(base, offloaded=layers)):
            return None
        if self.options.offload == "on":
            return replace(base, offloaded=layers)
        fewest = bisect.bisect_left(range(layers + 1), True, key=lambda n: self._fits(replace(base, offloaded=n)))
        return replace(base, offloaded=fewest)


def _seconds(candidate: Candidate) -> float:
    return candidate.timeline.step


def _policies(base: Choice, *, attention: int = 0, selective: int = 0, keep: int = 0) -> Choice:
    """The last `keep` layers keep all, `selective` before them part, `attention` before these the attention."""
    rest = len(base.policies) - attention - selective - keep
    order: tuple[tuple[Policy, int], ...] = (
        ("recompute", rest), ("keep_attention", attention), ("selective", selective), ("keep", keep)
    )  # fmt: skip
    return replace(base, policies=tuple(policy for policy, count in order for _ in range(count)))


def _most(depth: int, with_count: Callable[[int], Choice], fits: Callable[[Choice], bool]) -> Choice:
    """with_count(n) of the largest n in 0..depth that fits; more never fits where less does not. n = 0 is known to fit."""
    first_too_many = bisect.bisect_left(range(1, depth + 1), True, key=lambda n: not fits(with_count(n)))
    return with_count(first_too_many)
