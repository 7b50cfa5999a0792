"""What the pipeline did in a step: the part of a step's record that says where its time went.

[Note: which work a record is about]
A record is written when its step's loss is known. Gradients may still be on their way to the host then, and AdamW of the step
has not begun, and nothing is waited for to measure it. So the figures of copies and AdamW are of what *ended* since the record
before: the step's own copies in, nearly all of its copies out, and the updates of the step before. In a steady run that is
a step's work.

[Note: hidden copies]
A copy is hidden while the compute stream works. It does so between the step's first launch and its end, except while it waits.
Gaps between two kernels that no wait explains (a host too slow to launch) count as work here; NVML's utilisation shows them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatrain.metrics.spans import Span, Wait, common, gaps, length, union


@dataclass(frozen=True, kw_only=True)
class Link:
    """Copies of one direction.

    Attributes:
        bytes: That were copied.
        busy_s: Seconds of copying.
        gbps: 1e9 bytes a second while copying.
        share: Of the link's measured rate; None where nobody has measured it.
    """

    bytes: int
    busy_s: float
    gbps: float
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """See the notes above. A figure that the machine or the step does not have is None.

    Attributes:
        computed_s: The device worked, from the step's first launch to its end, waits left out.
        waited_s: The device had nothing to do until something came, by what that was; see `Wait`.
        h2d, d2h: Copies to and from the device.
        overlap: Share of the copying that was hidden behind work of the device.
        slot_switch_s: Median time in which compute goes from one layer's weights to the next.
        slabs: Gradient slabs that there are for layers; 0 where gradients need none.
        slabs_in_use: Most of them at once.
        slab_waits: How often none was free.
        adamw_params_per_s: Rate of the host's threads while they updated.
        adamw_gbps: Of host memory, read and written, while they did.
        adamw_share: Of the host memory's measured bandwidth.
        gpu_utilisation: Share of the last second in which some kernel ran (NVML).
        device_used_bytes: Of the whole device, by all processes (NVML).
        device_reserved_bytes: By this process's allocator.
        device_total_bytes: The device's memory.
        host_pinned_bytes: Pinned host memory.
        policy: How the step was cut, what lives where, what was kept.
        ladder: What running out of device memory has changed so far, in words of the config.
    """

    computed_s: float
    waited_s: dict[str, float] = field(default_factory=dict)
    h2d: Link | None = None
    d2h: Link | None = None
    overlap: float | None = None
    slot_switch_s: float | None = None
    slabs: int = 0
    slabs_in_use: int = 0
    slab_waits: int = 0
    adamw_params_per_s: float | None = None
    adamw_gbps: float | None = None
    adamw_share: float | None = None
    gpu_utilisation: float | None = None
    device_used_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    host_pinned_bytes: int = 0
    policy: str = ""
    ladder: tuple[str, ...] = ()

    @property
    def all_waits_s(self) -> float:
        return sum(self.waited_s.values())


def pipeline_of(spans: Sequence[Span], *, adamw_bytes: float) -> PipelineRecord:
    """The figures that follow from what ended since the record before; see [Note: which work a record is about].

    Args:
        spans: With one `step` among them.
        adamw_bytes: Host memory that AdamW reads and writes for one parameter.
    """
    step = [span for span in spans if span.row == "step"][-1]
    waits = [span for span in spans if span.row == "wait" and span.start_s >= step.start_s]
    waited: dict[Wait | str, float] = {}
    for span in waits:
        waited[span.name] = waited.get(span.name, 0.0) + span.seconds
    working = gaps((step.start_s, step.end_s), union((s.start_s, s.end_s) for s in waits))
    copies = union((span.start_s, span.end_s) for span in spans if span.row in ("h2d", "d2h"))
    switches = [span.seconds for span in waits if span.name == "weights"]
    updates = [span for span in spans if span.row == "adamw"]
    busy = length(union((span.start_s, span.end_s) for span in updates))
    rate = sum(span.size for span in updates) / busy if busy > 0 else None
    copying = length(copies)
    return PipelineRecord(
        computed_s=length(working),
        waited_s=waited,
        h2d=_link([span for span in spans if span.row == "h2d"]),
        d2h=_link([span for span in spans if span.row == "d2h"]),
        overlap=common(copies, working) / copying if copying > 0 else None,
        slot_switch_s=statistics.median(switches) if switches else None,
        adamw_params_per_s=rate,
        adamw_gbps=rate * adamw_bytes / 1e9 if rate is not None else None,
    )


def _link(copies: Sequence[Span]) -> Link | None:
    seconds = sum(span.seconds for span in copies)
    if seconds <= 0:
        return None
    moved = sum(span.size for span in copies)
    return Link(bytes=moved, busy_s=seconds, gbps=moved / seconds / 1e9)


def with_shares(
    record: PipelineRecord, *, h2d_gbps: float | None, d2h_gbps: float | None, host_gbps: float | None
) -> PipelineRecord:
    """The record with shares of what a measurement of the machine has found; None where there was none."""

    def on(link: Link | None, gbps: float | None) -> Link | None:
        return link if link is None or not gbps else replace(link, share=link.gbps / gbps)

    share = record.adamw_gbps / host_gbps if record.adamw_gbps is not None and host_gbps else None
    return replace(record, h2d=on(record.h2d, h2d_gbps), d2h=on(record.d2h, d2h_gbps), adamw_share=share)


def pipeline_from(plain: dict[str, object]) -> PipelineRecord:
    """A record from its JSON; names of a newer version are left out.

    Raises:
        TypeError: It is no record.
    """
    known = {name: value for name, value in plain.items() if name in PipelineRecord.__dataclass_fields__}
    for name in ("h2d", "d2h"):
        link = known.get(name)
        if isinstance(link, dict):
            known[name] = Link(**{key: link[key] for key in Link.__dataclass_fields__ if key in link})
    if "ladder" in known:
        known["ladder"] = tuple(known["ladder"])  # type: ignore[arg-type]
    return PipelineRecord(**known)  # type: ignore[arg-type]
