"""The search for the fastest predicted step that fits.

It tries numbers of resident layers, resident edges, accumulation steps, microbatch rows and head chunks. For each combination the
rest follows by rule. Layer inputs are offloaded as far as necessary, or all of them. Device memory that is left is filled with
activations: `selective` layers first (they save most time per byte), then `keep`; late layers first, because they free theirs
first. Where rows are so long that MLPs run in chunks of tokens, attention is most of the work, and layers keep their attention
instead. Where all layers are resident shards of several ranks, each rank may hold their whole weights, too. The number of
resident layers is tried coarsely, then finely around the best. More accumulation steps are tried only while fewer leave something
to gain. Of plans that differ by less than the prediction's accuracy, the one with the most resident units is taken, because it
depends least on the link and the CPU.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain.engine.plan import Policy
from megatrain.planner.memory import device_peak, host_lines
from megatrain.planner.plan import Choice, PlanRequest
from megatrain.planner.timeline import Timeline, simulate

MICROBATCH_TOKENS = (32768, 16384, 8192, 4096)
MLP_CHUNK_TOKENS = 16384
LONG_TOKENS = 65536
"""MLPs run in chunks from this many tokens that a layer computes together."""
ACCUMULATION_STEPS = (1, 2, 4, 8, 16)
COARSE_STEPS = 8
AS_GOOD = 1.004
"""Plans within this factor of the fastest count as equally fast."""
ALL_RESIDENT_AS_GOOD = 1.03
HOST_SHARE = 0.9
"""Share of the host's AdamW rate at which choices are compared: the data loader, saves and other processes use cores and memory,
too. At the full rate, the winner's updates would end just in time, and every disturbance would stall it."""


_seconds = operator.attrgetter("seconds")


@dataclass(frozen=True)
class Candidate:
    """A choice that fits, with its predicted step."""

    choice: Choice
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return self.timeline.step


class Search:
    """The choices of one request."""

    def __init__(self, request: PlanRequest):
        self.request = request
        self.shape, self.step, self.options = request.shape, request.step, request.options

    def best(self) -> Candidate | None:
        """The fastest choice that fits, None if nothing does."""
        depth = self.shape.depth
        stride = max(1, depth // COARSE_STEPS)
        coarse = sorted({*range(0, depth + 1, stride), depth})
        found: list[Candidate] = []
        for accumulation_steps in self._accumulation_steps():
            found += [c for layers in coarse for c in self._candidates(layers, accumulation_steps)]
            if not found and accumulation_steps == 1:  # the only fitting choice may lie between two coarse points
                between = (layers for layers in range(depth + 1) if layers not in coarse)
                found += itertools.islice(
                    (c for layers in between for c in self._candidates(layers, accumulation_steps)), 50
                )
            if found and self._little_to_gain(min(found, key=_seconds)):
                break
        if not found:
            return None
        found.sort(key=_seconds)
        near = {
            (layers, c.choice.accumulation_steps)
            for c in found[:3]
            for layers in range(c.choice.resident_layers - stride + 1, c.choice.resident_layers + stride)
            if 0 <= layers <= depth and layers not in coarse
        }
        found += [c for layers, accumulation_steps in near for c in self._candidates(layers, accumulation_steps)]
        choice = self._preferred(found).choice
        return Candidate(choice, self._timeline(choice))

    def any_fits(self) -> bool:
        """Whether any choice fits, without a search for the fastest."""
        return any(self._filled(base) is not None for base in self._all_bases())

    def closest(self) -> Choice:
        """The choice that comes closest to fitting: on the device first, then on the host."""

        def missing(choice: Choice) -> tuple[int, int, int]:
            host = self._host_bytes(choice) - self.request.caps.host_bytes
            device = self._device_bytes(choice) - self.request.caps.device_bytes
            return max(0, device), max(0, host), choice.accumulation_steps

        return min((self._offloaded(base) or base for base in self._all_bases()), key=missing)

    def _timeline(self, choice: Choice, host_share: float = 1.0) -> Timeline:
        return simulate(self.shape, self.request.machine, self.step, self.options, choice, host_share)

    def _host_bytes(self, choice: Choice) -> int:
        return sum(host_lines(self.shape, self.step, self.options, choice).values())

    def _device_bytes(self, choice: Choice) -> int:
        return device_peak(self.shape, self.step, self.options, choice).nbytes

    def _fits_host(self, choice: Choice) -> bool:
        return self._host_bytes(choice) <= self.request.caps.host_bytes

    def _fits(self, choice: Choice) -> bool:
        return self._device_bytes(choice) <= self.request.caps.device_bytes

    def _all_bases(self) -> Iterator[Choice]:
        """Bases with up to some forty different numbers of resident layers."""
        depth = self.shape.depth
        counts = sorted({*range(0, depth + 1, 1 + depth // 40), depth})
        for accumulation_steps in self._accumulation_steps():
            for layers in counts:
                yield from self._bases(layers, accumulation_steps)

    def _little_to_gain(self, best: Candidate) -> bool:
        """Whether more accumulation steps, which keep more activations each, cannot help: no layer is recomputed by choice."""
        return "recompute" not in best.choice.policies or self.options.policy == "recompute"

    def _preferred(self, found: list[Candidate]) -> Candidate:
        fastest = min(map(_seconds, found))
        whole = [c for c in found if c.choice.resident_elements(self.shape) == self.shape.parameters]
        if whole and min(map(_seconds, whole)) <= ALL_RESIDENT_AS_GOOD * fastest:
            return min(whole, key=_seconds)

        def preference(candidate: Candidate) -> tuple[float, ...]:
            choice = candidate.choice
            return (
                -choice.accumulation_steps,
                -choice.offloaded,
                choice.resident_elements(self.shape),
                -candidate.seconds,
            )

        return max((c for c in found if c.seconds <= AS_GOOD * fastest), key=preference)

    @property
    def _may_offload(self) -> bool:
        return self.options.offload_input != "off" and self.options.segment == 1

    @property
    def _may_reside(self) -> bool:
        return self.options.gradient_plane and self.options.compute != "fp16"

    def _candidates(self, layers: int, accumulation_steps: int) -> Iterator[Candidate]:
        for base in self._bases(layers, accumulation_steps):
            filled = self._filled(base)
            if filled is None:
                continue
            yield Candidate(filled, self._timeline(filled, HOST_SHARE))
            if layers == self.shape.depth and self.options.weight_slots == "auto" and self.options.ranks > 1:
                whole = self._filled(replace(base, replicated=True))
                if whole is not None:
                    yield Candidate(whole, self._timeline(whole, HOST_SHARE))
            if self._may_offload and not filled.offloaded and set(filled.policies) != {"keep"}:
                lighter = self._filled(replace(base, offloaded=self.shape.depth))
                if lighter is not None:
                    yield Candidate(lighter, self._timeline(lighter, HOST_SHARE))

    def _bases(self, layers: int, accumulation_steps: int) -> Iterator[Choice]:
        """Every cut of the step and placement of the edges, with no activations kept beyond those that the user asked for."""
        options, shape = self.options, self.shape
        if layers and not self._may_reside:
            return
        policy: Policy = "recompute" if options.policy == "auto" else options.policy
        embedding_choices = (False, True) if self._may_reside and shape.embedding else (False,)
        head_choices = (False, True) if self._may_reside and shape.head else (False,)
        cuts = itertools.product(
            embedding_choices,
            head_choices,
            self._microbatch_rows(accumulation_steps),
            self._head_tokens(accumulation_steps),
        )
        for embedding, head, microbatch_rows, head_tokens in cuts:
            yield Choice(
                resident_layers=layers,
                resident_embedding=embedding,
                resident_head=head,
                policies=(policy,) * shape.depth,
                offloaded=0,
                accumulation_steps=accumulation_steps,
                microbatch_rows=microbatch_rows,
                head_chunk_tokens=head_tokens,
                mlp_chunk_tokens=self._mlp_chunk(accumulation_steps, microbatch_rows),
                replicated=options.weight_slots == "all",
            )

    def _accumulation_steps(self) -> list[int]:
        if self.options.accumulation_steps is not None or not self.options.gradient_plane:
            return [min(self.options.accumulation_steps or 1, self.step.rows)]
        return [steps for steps in ACCUMULATION_STEPS if steps <= self.step.rows]

    def _microbatch_rows(self, accumulation_steps: int) -> list[int]:
        rows = -(-self.step.rows // accumulation_steps)
        if self.options.microbatch_rows is not None:
            return [min(self.options.microbatch_rows, rows)]
        return sorted({min(rows, max(1, tokens // self.step.tokens)) for tokens in MICROBATCH_TOKENS}, reverse=True)

    def _head_tokens(self, accumulation_steps: int) -> list[int]:
        """Up to D tokens, the logits of a head chunk take no more memory than one more copy of the head's gradient."""
        tokens = -(-self.step.rows // accumulation_steps) * self.step.tokens
        if self.options.head_chunk_tokens is not None:
            return [self.options.head_chunk_tokens]
        width = 1 << (self.shape.hidden.bit_length() - 1)
        return sorted({min(tokens, max(1024, width)), min(tokens, 8192)}, reverse=True)

    def _mlp_chunk(self, accumulation_steps: int, microbatch_rows: int) -> int | None:
        """Tokens of an MLP's chunk; None unless a microbatch is so long that chunks cost next to nothing."""
        rows = -(-self.step.rows // accumulation_steps)
        tokens = -(-rows // -(-rows // microbatch_rows)) * self.step.tokens
        token_wise = any(cost.token_wise_parameters for cost in self.shape.costs)
        if self.options.policy in ("keep", "selective", "keep_mlp") or not token_wise:
            return None
        if self.options.mlp_chunk_tokens is not None:
            return self.options.mlp_chunk_tokens
        return MLP_CHUNK_TOKENS if tokens >= LONG_TOKENS else None

    def _filled(self, base: Choice) -> Choice | None:
        """The base with as few offloaded inputs as necessary and as many kept activations as fit; None if it does not fit."""
        options, depth = self.options, self.shape.depth
        if not self._fits_host(base):
            return None
        if base.mlp_chunk_tokens is not None and options.policy == "auto" and options.segment == 1:
            return self._attention_kept(base)
        if options.offload_input == "on" or not self._fits(base):
            return self._offloaded_within_host(base)
        if options.policy != "auto" or options.segment > 1:
            return base
        if not options.compiled:
            return _most(depth, lambda n: _policies(base, keep=n), self._fits)
        filled = _most(depth, lambda n: _policies(base, selective=n), self._fits)
        if "recompute" in filled.policies:
            return filled
        return _most(depth, lambda n: _policies(base, selective=depth - n, keep=n), self._fits)

    def _attention_kept(self, base: Choice) -> Choice | None:
        """The base with the attention of as many late layers kept as fit, and inputs offloaded as necessary."""

        def with_kept(count: int) -> Choice | None:
            choice = _policies(base, keep_attention=count)
            if self.options.offload_input == "on" or not self._fits(choice):
                return self._offloaded_within_host(choice)
            return choice

        most = bisect.bisect_left(range(1, self.shape.depth + 1), True, key=lambda n: with_kept(n) is None)
        return with_kept(most)

    def _offloaded_within_host(self, base: Choice) -> Choice | None:
        found = self._offloaded(base)
        return found if found is not None and self._fits_host(found) else None

    def _offloaded(self, base: Choice) -> Choice | None:
        """The base with as few offloaded inputs as the device needs, None if all are too few; host memory is not checked."""
        layers = self.shape.depth
        if not self._may_offload or not self._fits(replace(base, offloaded=layers)):
            return None
        if self.options.offload_input == "on":
            return replace(base, offloaded=layers)
        fewest = bisect.bisect_left(range(layers + 1), True, key=lambda n: self._fits(replace(base, offloaded=n)))
        return replace(base, offloaded=fewest)


def _policies(base: Choice, *, keep_attention: int = 0, selective: int = 0, keep: int = 0) -> Choice:
    """The base with layers in this order: recompute, then the given numbers of `keep_attention`, `selective` and `keep`."""
    rest = len(base.policies) - keep_attention - selective - keep
    order: tuple[tuple[Policy, int], ...] = (
        ("recompute", rest), ("keep_attention", keep_attention), ("selective", selective), ("keep", keep)
    )  # fmt: skip
    return replace(base, policies=tuple(policy for policy, count in order for _ in range(count)))


def _most(depth: int, with_count: Callable[[int], Choice], fits: Callable[[Choice], bool]) -> Choice:
    """with_count(n) of the largest n in 0..depth that fits. with_count(0) fits, and memory grows with n."""
    first_too_many = bisect.bisect_left(range(1, depth + 1), True, key=lambda n: not fits(with_count(n)))
    return with_count(first_too_many)
