"""Memory of a run on the CPU: the ledger, its comparison with this machine, and the refusal with remedies that were tried.

[Note: the ledger of a CPU run]
Planes, buffers and activations are those of a GPU run, all in host memory (`cpu_lines`). In addition there is what the process
still needs behind its checks (compiled kernels, pictures, gaps of the allocator); what a save holds: one unit in the form in
which it is written, and in the background copies of units that are updated before they are written; and the memory that must
stay free, below which the run would save and end.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatrain.config.schema import RunConfig
from megatrain.engine.plan import MICROBATCH_TOKENS, head_chunk_tokens_of
from megatrain.errors import PlanRefused
from megatrain.host_memory.available import available_host_bytes
from megatrain.models.trainable import Trainable
from megatrain.planner.memory import cpu_lines
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.planner.plan import Choice, Lines, StepSize
from megatrain.planner.run import options_of
from megatrain.units import GIB, MIB, gib, gibs, size_lines

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROCESS_BYTES = 128 * MIB
"""What the process still needs behind its checks. Measured: 118 MiB."""
FILE_BYTES, WRITTEN_BYTES = 128 * MIB, 8
"""A save in the foreground: buffers of files, at most the checkpoint's size, and bytes per parameter of the unit that is being
written. Measured / by formula: units of 3.9 M parameters 155 / 158 MiB, of 15.7 M 228 / 248."""
LEAST_COPIES = 2
"""A background save has at least this many of the largest units copied, unless the host's last GiB is reached."""
RESERVE = "kept free (memory.host_reserve_gib)"
MOST_PAIRS = 5
LEAST_ROW_TOKENS = 16
"""Shorter rows are not suggested."""


def check_cpu_memory(run: RunConfig, config: PreTrainedConfig) -> Lines:
    """Host memory that a run on the CPU needs, by purpose. See [Note: the ledger of a CPU run].

    Args:
        run: The config of a training run.
        config: The model's config.

    Raises:
        PlanRefused: It needs more than is available, or more than `memory.host_gib` allows.
    """
    given = {"attn_implementation": run.model.attn_implementation, "trust_remote_code": run.model.trust_remote_code}
    trained = Trainable(run.train.freeze, run.train.only)
    ledger = Ledger(shape_of(config, **given, trainable=trained), available_host_bytes())
    if not ledger.fits(run):
        raise PlanRefused("\n".join(ledger.refusal(run)))
    return ledger.lines(run)


@dataclass(frozen=True)
class Remedy:
    """A setting and values for it, from the mildest to the strongest. `also`: what changes with each value, by config key."""

    key: str
    values: Sequence[Any]
    also: Sequence[Mapping[str, Any]] = ()
    comment: str = ""

    def changes(self) -> Iterator[dict[str, Any]]:
        for number, value in enumerate(self.values):
            yield {self.key: value, **(self.also[number] if self.also else {})}


@dataclass(frozen=True)
class Ledger:
    """The memory of runs of one model on this machine.

    Attributes:
        shape: The model.
        available_bytes: Host memory that this process can still allocate.
    """

    shape: ModelShape
    available_bytes: int

    def lines(self, run: RunConfig) -> dict[str, int]:
        """Bytes by purpose, what must stay free included."""
        shape, step = self.shape, StepSize(run.rows_per_step, run.data.max_tokens)
        compute = "fp32" if run.precision.compute_dtype == "auto" else run.precision.compute_dtype
        options = replace(options_of(run, compute), compiled=False)  # layers are compiled on GPUs only
        policy = "recompute" if options.policy == "auto" or options.segment > 1 else options.policy
        choice = Choice(
            resident_layers=0,
            resident_embedding=False,
            resident_head=False,
            policies=(policy,) * shape.depth,
            offloaded=shape.depth if options.offload_input == "on" else 0,
            accumulation_steps=min(run.batch.accumulation_steps, step.rows),
            microbatch_rows=options.microbatch_rows or max(1, MICROBATCH_TOKENS // step.tokens),
            head_chunk_tokens=options.head_chunk_tokens or head_chunk_tokens_of(shape.vocabulary, options.compiled),
            mlp_chunk_tokens=options.mlp_chunk_tokens,
        )
        more = {
            "process: compiled kernels, pictures": PROCESS_BYTES,
            **self._save_lines(run, options.optim.bytes_per_parameter),
            RESERVE: int(run.memory.host_reserve_gib * GIB),
        }
        return {**cpu_lines(shape, step, options, choice), **{name: size for name, size in more.items() if size}}

    def _save_lines(self, run: RunConfig, width: float) -> dict[str, int]:
        """Memory of a save, where the run makes any."""
        section, shape = run.checkpoint, self.shape
        during = section.every_steps is not None or section.weights_every_steps is not None
        if not during and not section.at_end:
            return {}
        largest, whole_bytes = max(*shape.layers, shape.embedding, shape.head), math.ceil(shape.parameters * width)
        largest_bytes = math.ceil(largest * width)
        lines = {"a unit while it is saved, files": WRITTEN_BYTES * largest + min(FILE_BYTES, whole_bytes)}
        if during and section.background:
            asked = LEAST_COPIES * largest_bytes if section.buffer_gib == "auto" else int(section.buffer_gib * GIB)
            lines["copies during a save (checkpoint.buffer_gib)"] = min(max(asked, largest_bytes), whole_bytes)
        return lines

    def needed_bytes(self, run: RunConfig) -> int:
        """Bytes that the run uses: without what must stay free."""
        return sum(size for name, size in self.lines(run).items() if name != RESERVE)

    def allowed_bytes(self, run: RunConfig) -> int:
        """Bytes that the run may use."""
        free = self.available_bytes - int(run.memory.host_reserve_gib * GIB)
        return free if run.memory.host_gib == "auto" else min(free, int(run.memory.host_gib * GIB))

    def fits(self, run: RunConfig) -> bool:
        return self.needed_bytes(run) <= self.allowed_bytes(run)

    # ---------------------------------------------------------------- refusals

    def refusal(self, run: RunConfig) -> Iterator[str]:
        """The ledger, and remedies: key, value, value now, and whether the run fits then."""
        needed, lines = self.needed_bytes(run), self.lines(run)
        cap, allowed_bytes, available = run.memory.host_gib, self.available_bytes, "available"
        if cap != "auto" and self.available_bytes - lines.get(RESERVE, 0) >= int(cap * GIB):
            lines.pop(RESERVE, None)
            allowed_bytes, available = int(cap * GIB), f"allowed (memory.host_gib: {cap:g})"
        needs, allowed = gibs(sum(lines.values()), allowed_bytes, digits=2)
        yield f"not enough host memory: {needs} needed, {allowed} {available}"
        yield from size_lines(lines)
        yield "  how to reduce it:"
        enough, others = [], []
        for remedy in self._remedies(run):
            if not (changes := list(remedy.changes())):
                continue
            less = needed - self.needed_bytes(changed(run, changes[-1]))
            if (fit := self._first_fit(run, changes)) is not None:
                enough.append((remedy, fit))
            elif less > 0:
                others.append((remedy, changes[-1], less))
        yield from (f"    - {_text(run, fit)}{remedy.comment}; then it fits" for remedy, fit in enough)
        yield from (
            f"    - {_text(run, strongest)}{remedy.comment}; not enough alone, {gib(less)} less"
            for remedy, strongest, less in others
        )
        if not enough:
            yield from self._pairs(run)
        yield f"    - a machine with {gib(needed + int(run.memory.host_reserve_gib * GIB), 2)} available, or a smaller model"

    def _first_fit(self, run: RunConfig, changes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The mildest of the changes with which the run fits. A stronger one needs no more memory than a milder one."""
        number = bisect.bisect_left(changes, True, key=lambda change: self.fits(changed(run, change)))
        return changes[number] if number < len(changes) else None

    def _pairs(self, run: RunConfig) -> Iterator[str]:
        """Two remedies together, the mildest values that fit; the first `MOST_PAIRS` pairs."""
        found = 0
        for pair in itertools.combinations(self._remedies(run), 2):
            few, many = sorted(pair, key=lambda remedy: len(remedy.values))
            for one in few.changes():
                if found == MOST_PAIRS or one.keys() & {many.key, *(key for also in many.also for key in also)}:
                    break
                if (two := self._first_fit(changed(run, one), list(many.changes()))) is not None:
                    found += 1
                    yield f"    - together: {_text(run, {**one, **two})}; then it fits"
                    break

    def _remedies(self, run: RunConfig) -> Iterator[Remedy]:
        rows, tokens, batch = run.rows_per_step, run.data.max_tokens, run.batch
        spare = self.available_bytes - self.needed_bytes(run)
        if run.memory.host_reserve_gib:
            # 0 does not protect the run; it is named where nothing else is left
            yield Remedy(
                "memory.host_reserve_gib", [math.floor(100 * spare / GIB) / 100] if spare >= GIB // 100 else [0]
            )
        if run.memory.host_gib != "auto":
            yield Remedy("memory.host_gib", [math.ceil(100 * self.needed_bytes(run) / GIB) / 100])
        if run.checkpoint.background and run.checkpoint.every_steps is not None:
            yield Remedy("checkpoint.background", [False], comment=": training waits for saves")
        more = [n for n in (1 << k for k in range(1, 32)) if batch.accumulation_steps < n <= rows]
        if run.memory.gradient_plane:
            yield Remedy("batch.accumulation_steps", more)
            clipping = {"optim.max_grad_norm": None, "batch.accumulation_steps": 1}
            yield Remedy(
                "memory.gradient_plane",
                [False],
                [{key: value for key, value in clipping.items() if value_of(run, key) != value}],
            )
        together = batch.microbatch_rows or max(1, MICROBATCH_TOKENS // tokens)
        yield Remedy("batch.microbatch_rows", list(_halves(min(together, rows), 1)))
        yield Remedy(
            "batch.tokens_per_step", [n * tokens for n in range(rows - 1, 0, -1)], comment=": fewer rows a step"
        )
        shorter = list(_halves(tokens, LEAST_ROW_TOKENS))
        yield Remedy(
            "data.max_tokens", shorter, [{"batch.tokens_per_step": rows * n} for n in shorter], ": shorter rows"
        )
        if run.precision.compute_dtype in ("auto", "fp32"):
            yield Remedy("precision.compute_dtype", ["bf16"], comment=": less precise, and slow on a CPU")


def _halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def changed(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The run with other settings, by config key. Nothing is validated."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return run.model_copy(
        update={section: getattr(run, section).model_copy(update=values) for section, values in sections.items()}
    )


def value_of(run: RunConfig, key: str) -> Any:
    """The value of a config key."""
    section, _, name = key.partition(".")
    return getattr(getattr(run, section), name)


def _text(run: RunConfig, changes: Mapping[str, Any]) -> str:
    """`batch.tokens_per_step: 1024 (now 4096)`"""
    return " with ".join(f"{key}: {_yaml(value)} (now {_yaml(value_of(run, key))})" for key, value in changes.items())


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
