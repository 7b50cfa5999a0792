"""Runs a step on one rank: cuts the batch into the rank's microbatches and runs them through the local stages.

[Note: one schedule per shape]
torch's stages allocate their receive buffers for one shape, and gloo delivers a shorter message into a longer buffer without an
error, leaving stale rows. So a torch stage and schedule are made for each shape of a microbatch. They hold no parameters, but
receive buffers for all microbatches, so only those of the latest shapes are kept. Shapes are given statically: nothing is
inferred by a trial run.

[Note: evaluation]
Evaluation has its own loop instead of `schedule.eval`, which would switch torch's stages to forward-only and back, and make FSDP
reduce in between.

[Note: order of messages]
NCCL runs the messages between two ranks in the order in which each of them issued them, and a large send ends only when the
other side receives. Gloo's messages wait for nothing, so an order that deadlocks shows up on GPUs only. In evaluation both ends
of every pair therefore issue a stage's messages together: first all receives, then all sends.

Shapes: B rows, T tokens, padded to multiples the layout divides; L = T / context tokens of one rank.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from megatrain.engine.mesh.context_parallel import documents_of, zigzag_order
from megatrain.engine.mesh.data_parallel import Devices
from megatrain.engine.mesh.layout import Coordinate, Layout
from megatrain.engine.mesh.pipeline_schedule import SCHEDULE_CLASSES, Action, Kind, Table, action_table
from megatrain.engine.mesh.stage import Stage
from megatrain.engine.mesh.zero_bubble import WeightGradStore
from megatrain.engine.objective import IGNORED
from megatrain.errors import UserError

Batch = dict[str, torch.Tensor]

KEPT_SHAPES = 4
"""Unpacked rows give nearly every step a new shape."""


def refuse_mask(batch: Batch) -> None:
    """Raise a UserError for an attention mask. `batches.checked` has dropped one that only hides padding at the ends of rows."""
    mask = batch.get("attention_mask")
    if mask is not None:
        holes = bool((mask[:, 1:] > mask[:, :-1]).any())
        raise UserError(
            "masks tokens before real ones" if holes else "masks tokens that are targets",
            "batch['attention_mask']",
            "the mesh engine takes padding at the end of rows only; separate documents by document_ids",
        )


def microbatches(batch: Batch, layout: Layout, at: Coordinate, device: torch.device) -> list[Batch]:
    """The microbatches of the rank at a coordinate.

    Rows and tokens are padded at the end to what the layout needs: padding predicts nothing, and no real token sees it.

    Args:
        batch: `input_ids`, `labels` (B, T), unshifted, and `position_ids` if they are not trivial; the same on all ranks.

    Returns:
        Per microbatch `input_ids`, `labels` (rows, L), the labels shifted: what each token predicts; and `position_ids`
        (rows, L), `documents` (rows, T) if the model needs them.
    """
    padded = _padded(batch, layout)
    rows, tokens = padded["input_ids"].shape
    data_rank = at.replicate * (layout.data // layout.replicate) + at.shard
    own_rows = rows // layout.data
    own = {name: tensor[data_rank * own_rows : (data_rank + 1) * own_rows] for name, tensor in padded.items()}
    positions = own.get("position_ids")
    if layout.context > 1:
        order = zigzag_order(tokens, layout.context)
        local = order[at.context * tokens // layout.context : (at.context + 1) * tokens // layout.context]
        if positions is not None:
            own["documents"] = documents_of(positions)[:, order]
        else:
            own["position_ids"] = torch.arange(tokens).expand(own_rows, tokens)
        for name in ("input_ids", "labels", "position_ids"):
            own[name] = own[name][:, local]
    size = own_rows // layout.microbatch_count
    return [
        {name: tensor[i * size : (i + 1) * size].contiguous().to(device) for name, tensor in own.items()}
        for i in range(layout.microbatch_count)
    ]


def _padded(batch: Batch, layout: Layout) -> Batch:
    """Shift the labels, then pad rows and tokens at the end."""
    rows, tokens = batch["input_ids"].shape
    more_rows, more_tokens = -rows % layout.row_multiple, -tokens % layout.token_multiple
    labels = torch.full_like(batch["labels"], IGNORED)
    labels[:, :-1] = batch["labels"][:, 1:]
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, more_tokens, 0, more_rows)),
        "labels": torch.nn.functional.pad(labels, (0, more_tokens, 0, more_rows), value=IGNORED),
    }
    if "position_ids" in batch:
        positions = torch.arange(tokens + more_tokens).repeat(rows + more_rows, 1)
        positions[:, tokens:] -= tokens  # the padding is a separate document
        positions[:rows, :tokens] = batch["position_ids"]
        padded["position_ids"] = positions
    return padded


class Timed(NamedTuple):
    """An action with its begin and end, in seconds since the step began."""

    action: Action
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class ActionClock:
    """Times the actions of one rank and one step. On CUDA with events on the current stream: nothing waits for them."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._start: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def start(self) -> None:
        """Begin a step and discard the previous measurements."""
        self._marks.clear()
        self._start = self._now()

    @contextlib.contextmanager
    def action(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        begin = self._now()
        yield
        self._marks.append((Action(kind, stage, microbatch), begin, self._now()))

    def read(self) -> list[Timed]:
        """The actions since `start`. On CUDA they must have ended: call it after a synchronisation of the step."""
        return [Timed(action, self._since(begin), self._since(end)) for action, begin, end in self._marks]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        return self._start.elapsed_time(mark) / 1e3 if self._cuda else mark - self._start


class _TorchStage(PipelineStage):
    """torch's stage with timed actions and the split backward of [Note: two halves] in zero_bubble.py."""

    clock: ActionClock
    weight_grads: WeightGradStore | None = None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 and 2.12 first exchange a number with the neighbouring stages, to set up NCCL's communicators. With a vee
        # schedule the neighbour may be this very rank, which torch refuses; gloo has nothing to set up.
        if self.device.type == "cpu":
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        with self.clock.action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            if full_backward or self.weight_grads is None:
                return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
            with self.weight_grads.deferring():
                return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=False, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            _into_fp32_sums(self.submod)


def _into_fp32_sums(stage: torch.nn.Module) -> None:
    """Add one microbatch's gradients to FSDP's sums in the reduction dtype, as its own hooks do in a whole backward.

    The weight half of a split backward bypasses these hooks. Left in `.grad`, the gradients of the next microbatches would be
    added to it in bf16, and the copy would occupy memory beside the sums.
    """
    for state in fully_shard.state(stage)._state_ctx.all_states:  # type: ignore[attr-defined]
        # Releases after 2.11 may have several groups.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                assert not group.reduce_grads, "gradients are reduced only after the last microbatch"
                group.post_backward()


class Runner:
    """Runs the local stages of a pipeline, given in model order.

    `hidden` is (D, dtype) of the hidden states between stages; `clock` times the actions of the latest `forward_backward`.
    """

    def __init__(self, stages: Sequence[Stage], devices: Devices, hidden: tuple[int, torch.dtype]):
        self.stages = list(stages)
        self.clock = ActionClock(devices.device)
        self._devices = devices
        self._layout = devices.layout
        self._hidden_size, self._hidden_dtype = hidden
        self._group = devices.mesh["pipeline"].get_group()
        self._schedules: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    @property
    def kept_schedules(self) -> int:
        """Shapes whose receive buffers are kept. See [Note: one schedule per shape]."""
        return len(self._schedules)

    def table(self) -> Table:
        """The actions of every pipeline rank in a step."""
        layout = self._layout
        return action_table(layout.schedule, layout.pipeline, layout.virtual, layout.microbatch_count)

    def forward_backward(self, microbatches: Sequence[Batch]) -> torch.Tensor:
        """Accumulate the gradients of all microbatches in the parameters' `.grad`, reduced over the fsdp ranks.

        Args:
            microbatches: `input_ids`, `labels` (B, L) and, in all or none of them, `position_ids`, `documents`.

        Returns:
            The loss of this rank's last stage, zero on ranks without it: a scalar.
        """
        self.clock.start()
        if self._layout.pipeline == 1:
            return self._loop(microbatches)
        names = sorted(microbatches[0])
        rows, tokens = microbatches[0]["input_ids"].shape
        schedule = self._schedule_of((len(microbatches), rows, tokens, *names))
        joined = {name: torch.cat([m[name] for m in microbatches]) for name in names}
        ids = joined.pop("input_ids")
        losses: list[torch.Tensor] = []
        args = (ids,) if self.stages[0].part.first else ()
        target = torch.zeros(len(microbatches)) if self.stages[-1].part.last else None
        schedule.step(*args, target=target, losses=losses, **joined)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero()

    def _loop(self, microbatches: Sequence[Batch]) -> torch.Tensor:
        """Without a pipeline. Gradients are reduced after each microbatch, so only sharded ones accumulate in memory."""
        (stage,) = self.stages
        total = self._zero()
        for number, microbatch in enumerate(microbatches):
            inputs = dict(microbatch)
            with self.clock.action("F", 0, number):
                loss = stage(inputs.pop("input_ids"), **inputs).sum()
            with self.clock.action("B", 0, number):
                loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, microbatches: Sequence[Batch]) -> torch.Tensor:
        """The loss of this rank's last stage (zero on ranks without it), without gradients. See [Note: evaluation]."""
        total = self._zero()
        here: dict[int, list[torch.Tensor]] = {}
        sent: list[Any] = []
        with torch.no_grad():
            for stage in self.stages:
                outputs: list[torch.Tensor] = []
                coming = self._receives(stage, microbatches, here)
                for microbatch in microbatches:
                    inputs = dict(microbatch)
                    given = inputs.pop("input_ids")
                    output = stage(given if stage.part.first else next(coming), **inputs)
                    outputs.append(output)
                    if stage.part.last:
                        total += output.sum()
                    elif self._layout.holder_of(stage.part.index + 1) != self._devices.at.pipeline:
                        output = output.contiguous()
                        peer = self._peer(stage.part.index + 1)
                        sent.append((dist.isend(output, peer, group=self._group), output))
                here[stage.part.index] = outputs
            for work, _ in sent:
                work.wait()
        for module in (module for stage in self.stages for module in stage.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # otherwise weights loaded before the next backward would have no effect
        return total

    def _receives(
        self, stage: Stage, microbatches: Sequence[Batch], here: dict[int, list[torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """The stage's input of each microbatch; all receives are issued at once. See [Note: order of messages]."""
        before = stage.part.index - 1
        if before in here:
            yield from here.pop(before)
            return
        received: list[tuple[Any, torch.Tensor]] = []
        for microbatch in microbatches:
            shape = self._hidden_shape(*microbatch["input_ids"].shape)
            hidden = torch.empty(shape, dtype=self._hidden_dtype, device=self._devices.device)
            received.append((dist.irecv(hidden, self._peer(before), group=self._group), hidden))
        for work, hidden in received:
            work.wait()
            yield hidden

    def _peer(self, stage: int) -> int:
        """Global rank that holds a stage in this rank's pipeline group."""
        return dist.get_global_rank(self._group, self._layout.holder_of(stage))

    def _hidden_shape(self, rows: int, tokens: int) -> tuple[int, int, int]:
        return rows, tokens // self._layout.tensor, self._hidden_size

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._devices.device)

    def _schedule_of(self, key: tuple[Any, ...]) -> Any:
        """See [Note: one schedule per shape]. All ranks of a pipeline see the same shapes and so keep the same ones."""
        if key not in self._schedules:
            while len(self._schedules) >= KEPT_SHAPES:
                self._schedules.popitem(last=False)
            self._schedules[key] = self._make_schedule(*key[:3])
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(self, count: int, rows: int, tokens: int) -> Any:
        stages = [self._torch_stage(stage, rows, tokens) for stage in self.stages]
        single = self._layout.schedule == "1f1b"
        return SCHEDULE_CLASSES[self._layout.schedule](
            stages[0] if single else stages,
            n_microbatches=count,
            loss_fn=lambda loss, target: loss.sum(),
            scale_grads=False,
        )

    def _torch_stage(self, stage: Stage, rows: int, tokens: int) -> PipelineStage:
        shape = self._hidden_shape(rows, tokens)
        hidden = torch.empty(shape, dtype=self._hidden_dtype, device="meta", requires_grad=True)
        ids = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        loss_dtype = torch.float64 if self._hidden_dtype == torch.float64 else torch.float32
        loss = torch.empty((1,), dtype=loss_dtype, device="meta", requires_grad=True)
        made = _TorchStage(
            stage, stage.part.index, stage.part.count, self._devices.device, group=self._group,
            input_args=ids if stage.part.first else hidden,
            output_args=loss if stage.part.last else hidden,
            dw_builder=None if stage.weight_grads is None else stage.weight_grads.take,
        )  # fmt: skip
        made.clock, made.weight_grads = self.clock, stage.weight_grads
        return made
