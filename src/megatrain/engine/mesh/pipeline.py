"""Forward and backward of a step through the stages: torch's pipeline schedules by name, or a plain loop.

[Note: one schedule per shape]
torch's stages allocate their receive buffers for one shape, and gloo delivers a shorter message into a longer buffer without an
error, leaving stale rows. So a stage and schedule of torch's are made for each shape of a microbatch; they hold no
parameters, but receive buffers for all microbatches, so only those of the latest shapes are kept. Shapes are given statically:
nothing is inferred by a trial run.

[Note: evaluation]
Evaluation is a loop of its own, not `schedule.eval`: that one would switch torch's stages to forward only and back, and make
FSDP reduce in between.

[Note: order of messages]
NCCL runs the messages between two ranks in the order in which each of them asked for them, and a large send ends only when the
other side receives. Gloo's messages wait for nothing, so an order that stands still shows on GPUs alone. In evaluation both ends
of every pair therefore name a stage's messages together: all of them received first, then all of them sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from megatrain.engine.mesh.actions import Action, ActionClock, one_forward_one_backward, table_of
from megatrain.engine.mesh.devices import Devices
from megatrain.engine.mesh.stage import Stage
from megatrain.engine.mesh.zero_bubble import Deferred

CLASSES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb1p": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

Microbatches = Sequence[dict[str, torch.Tensor]]
"""Per microbatch: `input_ids`, `labels` (B, L) and, for all or none of them, `position_ids`, `documents`."""


KEPT_SHAPES = 4
"""Unpacked rows give nearly every step a shape of its own."""


class _TorchStage(PipelineStage):
    """torch's stage, with its actions timed, and its backward split by [Note: two halves] in deferred.py."""

    clock: ActionClock
    deferred: Deferred | None = None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch 2.11 and 2.12 exchange a number with the neighbouring stages first, to set up NCCL's communicators. Where stages
        # run down the ranks and up again the neighbour may be this very rank, which torch refuses; gloo has nothing to set up.
        if self.device.type == "cpu":
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        with self.clock.action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            if full_backward or self.deferred is None:
                return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
            with self.deferred.putting_off():
                return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=False, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            _into_fp32_sums(self.submod)


def _into_fp32_sums(stage: torch.nn.Module) -> None:
    """Add the gradients of one microbatch to FSDP's sums in the reduction's type, as its own hooks do in a whole backward.

    The half for the weights goes around these hooks. Left in `.grad`, gradients of the next microbatches would be added to it
    in bf16, and the copy be held beside the sums.
    """
    for state in fully_shard.state(stage)._state_ctx.all_states:  # type: ignore[attr-defined]
        # Later releases than 2.11 may have several groups.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                assert not group.reduce_grads, "reduced only behind the last microbatch"
                group.post_backward()


class Runner:
    """Runs the local stages of a pipeline.

    Args:
        stages: The local stages, in the order of the model.
        devices: The mesh.
        hidden: (D, type) of the hidden states between stages.
    """

    def __init__(self, stages: Sequence[Stage], devices: Devices, hidden: tuple[int, torch.dtype]):
        self.stages = list(stages)
        self._devices = devices
        self._layout = devices.layout
        self._hidden_size, self._hidden_dtype = hidden
        self._group = devices.mesh["pipeline"].get_group()
        self._schedules: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._latest: Any = None
        self.clock = ActionClock(devices.device)
        """The actions of the latest `forward_backward`."""

    def table(self) -> list[list[Action]]:
        """The actions of every pipeline rank in the latest `forward_backward`, in order."""
        pieces = self._layout.pieces
        if self._layout.pipeline == 1:
            return [[Action(kind, 0, m) for m in range(pieces) for kind in ("F", "B")]]
        if self._layout.schedule == "1f1b":
            return one_forward_one_backward(self._layout.pipeline, pieces)
        return table_of(self._latest, self._layout.pipeline)

    def forward_backward(self, microbatches: Microbatches) -> torch.Tensor:
        """Gradients of all microbatches into the parameters' `.grad`, reduced over the fsdp ranks.

        Returns:
            The loss of this rank's last stage, zero on ranks without it: a scalar.
        """
        self.clock.start()
        if self._layout.pipeline == 1:
            return self._loop(microbatches)
        names = sorted(microbatches[0])
        rows, tokens = microbatches[0]["input_ids"].shape
        key = (len(microbatches), rows, tokens, *names)
        self._latest = self._schedule_of(key)
        joined = {name: torch.cat([m[name] for m in microbatches]) for name in names}
        ids = joined.pop("input_ids")
        losses: list[torch.Tensor] = []
        args = (ids,) if self.stages[0].part.first else ()
        target = torch.zeros(len(microbatches)) if self.stages[-1].part.last else None
        self._latest.step(*args, target=target, losses=losses, **joined)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero()

    def _loop(self, microbatches: Microbatches) -> torch.Tensor:
        """Without a pipeline: gradients are reduced after each microbatch, so only sharded ones add up in memory."""
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

    def evaluate(self, microbatches: Microbatches) -> torch.Tensor:
        """The loss of this rank's last stage, zero elsewhere, without gradients. See [Note: evaluation]."""
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
                module.reshard()  # nothing else would before the next backward, and what is loaded until then would not count
        return total

    def _receives(
        self, stage: Stage, microbatches: Microbatches, here: dict[int, list[torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """What the stage is given for each microbatch, asked for at once. See [Note: order of messages]."""
        before = stage.part.index - 1
        if before in here:
            yield from here.pop(before)
            return
        asked: list[tuple[Any, torch.Tensor]] = []
        for microbatch in microbatches:
            shape = self._hidden_shape(*microbatch["input_ids"].shape)
            hidden = torch.empty(shape, dtype=self._hidden_dtype, device=self._devices.device)
            asked.append((dist.irecv(hidden, self._peer(before), group=self._group), hidden))
        for work, hidden in asked:
            work.wait()
            yield hidden

    def _peer(self, stage: int) -> int:
        """Global rank of the holder of a stage in this rank's pipeline group."""
        return dist.get_global_rank(self._group, self._layout.holder_of(stage))

    def _hidden_shape(self, rows: int, tokens: int) -> tuple[int, int, int]:
        return rows, tokens // self._layout.tensor, self._hidden_size

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._devices.device)

    def _schedule_of(self, key: tuple[Any, ...]) -> Any:
        """See [Note: one schedule per shape]. All ranks of a pipeline see the same shapes, and so keep the same."""
        if key not in self._schedules:
            while len(self._schedules) >= KEPT_SHAPES:
                self._schedules.popitem(last=False)
            self._schedules[key] = self._make_schedule(*key[:3])
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(self, count: int, rows: int, tokens: int) -> Any:
        stages = [self._torch_stage(stage, rows, tokens) for stage in self.stages]
        single = self._layout.schedule == "1f1b"
        return CLASSES[self._layout.schedule](
            stages[0] if single else stages,
            n_microbatches=count,
            loss_fn=lambda loss, target: loss.sum(),
            scale_grads=False,
        )

    def _torch_stage(self, stage: Stage, rows: int, tokens: int) -> PipelineStage:
        hidden = torch.empty(
            self._hidden_shape(rows, tokens), dtype=self._hidden_dtype, device="meta", requires_grad=True
        )
        ids = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        loss_dtype = torch.float64 if self._hidden_dtype == torch.float64 else torch.float32
        loss = torch.empty((1,), dtype=loss_dtype, device="meta", requires_grad=True)
        made = _TorchStage(
            stage,
            stage.part.index,
            stage.part.count,
            self._devices.device,
            input_args=ids if stage.part.first else hidden,
            output_args=loss if stage.part.last else hidden,
            group=self._group,
            dw_builder=None if stage.deferred is None else stage.deferred.take,
        )
        made.clock, made.deferred = self.clock, stage.deferred
        return made
