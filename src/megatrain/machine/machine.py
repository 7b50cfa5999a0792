"""`Machine`: the figures of a machine that plans are made of, and their files.

GB = 10^9 bytes, GiB = 2^30 bytes. A machine file is YAML with these fields (see docs/machines); what a field leaves out has the
default given here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from megatrain.errors import UserError, near_paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPTIONAL = ("adamw_streaming_gparams", "attention_long_tflops", "device_node", "pin_limit_gib")
LARGEST = 1e15
"""No figure of a machine is larger, whatever its unit: it can be turned into bytes and compared."""
MAY_BE_ZERO = (
    "device_gib",
    "host_gib",
    "disk_write_gbps",
    "disk_read_gbps",
    "numa_nodes",
    "device_node",
    "pin_limit_gib",
)
"""A machine without that, or where it was not measured. All other figures are divided by."""
SHORT_ROW, LONG_ROW = 1024, 32768
"""Tokens of the rows in which attention is measured."""


@dataclass(frozen=True)
class Machine:
    """One GPU (or none), its host and the link between them.

    Attributes:
        name: For people.
        device_gib: Memory of the GPU that a process can have, 0 without a GPU.
        h2d_gbps, d2h_gbps: Pinned copies to and from the GPU, one way at a time.
        both_gbps: Each way when both run at once.
        host_gib: Memory of the host that a process can have.
        host_bandwidth_gbps: Of the host's memory, read and written bytes together.
        cores: That this process may use.
        adamw_gparams: AdamW on host planes by number of threads [1e9 parameters a second].
        adamw_streaming_gparams: The best of these while weights stream to the GPU.
        device_adamw_gparams: AdamW on the GPU [1e9 parameters a second].
        matrix_tflops: bf16 matrix products of a layer's sizes on the GPU, fp32 accumulation.
        device_bandwidth_gbps: Of the GPU's memory, read and written bytes together.
        attention_tflops: Fastest backend, causal forward and backward together, at 1,024 tokens.
        attention_long_tflops: The same at 32,768 tokens; None where it was not measured.
        attention_ms: Milliseconds by backend, for 16,384 tokens of 32 heads.
        disk_write_gbps, disk_read_gbps: Of the place where runs are written; 0 where it was not measured.
        numa_nodes: Memory nodes of the host.
        device_node: The node that the GPU hangs on, None where the system does not say.
        pin_limit_gib: What the system lets a process pin, None where no limit was met.
        link: Of the GPU, as the system describes it: `PCIe 5 x16`.
        versions: torch and driver, with which it was measured.
    """

    name: str
    device_gib: float
    host_gib: float
    cores: int
    h2d_gbps: float = 25.0
    d2h_gbps: float = 25.0
    both_gbps: float = 20.0
    host_bandwidth_gbps: float = 50.0
    adamw_gparams: Mapping[int, float] = field(default_factory=lambda: {1: 0.5})
    adamw_streaming_gparams: float | None = None
    device_adamw_gparams: float = 25.0
    matrix_tflops: float = 100.0
    device_bandwidth_gbps: float = 800.0
    attention_tflops: float = 60.0
    attention_long_tflops: float | None = None
    attention_ms: Mapping[str, float] = field(default_factory=dict)
    disk_write_gbps: float = 0.0
    disk_read_gbps: float = 0.0
    numa_nodes: int = 1
    device_node: int | None = None
    pin_limit_gib: float | None = None
    link: str = ""
    versions: str = ""

    @property
    def threads(self) -> int:
        """AdamW threads that are worth having: the fewest within 3% of the best measured rate."""
        best = max(self.adamw_gparams.values())
        return min(count for count, rate in self.adamw_gparams.items() if rate >= 0.97 * best)

    def attention_rate(self, tokens: int) -> float:
        """FLOPs a second of causal attention in rows of `tokens` tokens: seconds per FLOP are a line in 1 / tokens through the
        two measured lengths."""
        short, long = self.attention_tflops, self.attention_long_tflops
        if long is None:
            return short * 1e12
        slope = (1 / short - 1 / long) / (1 / SHORT_ROW - 1 / LONG_ROW)
        return 1e12 / (1 / long + slope * (1 / max(tokens, SHORT_ROW) - 1 / LONG_ROW))

    def adamw_rate(self, threads: int | None = None) -> float:
        """Parameters a second of AdamW on the host while weights stream; `threads` None means the best."""
        known = sorted(self.adamw_gparams)
        best = self.adamw_gparams[self.threads]
        alone = best
        if threads is not None:
            below = max((count for count in known if count <= threads), default=known[0])
            alone = min(best, self.adamw_gparams[below] * threads / below)
        share = self.adamw_streaming_gparams / best if self.adamw_streaming_gparams else 0.95
        return alone * min(1.0, share) * 1e9

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML."""
        return {
            **asdict(self),
            "adamw_gparams": dict(self.adamw_gparams),
            "attention_ms": dict(self.attention_ms),
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)


def machine_from(data: Mapping[str, Any], where: str) -> Machine:
    """A machine from plain data.

    Args:
        where: The file's name, for errors.

    Raises:
        UserError: A field is unknown, missing or no number; all problems at once.
    """
    problems = [*name_problems(data, Machine)]
    problems += [problem for f in fields(Machine) if f.name in data for problem in _problems_of(f.name, data[f.name])]
    if problems:
        raise UserError("; ".join(problems), where, "docs/planner.md describes the fields; docs/machines has examples")
    values = dict(data)
    if "adamw_gparams" in values:
        values["adamw_gparams"] = {int(count): float(rate) for count, rate in values["adamw_gparams"].items()}
    return Machine(**values)


def name_problems(data: Mapping[str, Any], figures: type[DataclassInstance]) -> Iterator[str]:
    """Keys of a file that the dataclass does not know, and fields without a default that the file does not give."""
    known = {f.name: f for f in fields(figures)}
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            yield f"unknown key {name!r}" + (f'; did you mean "{near[0]}"?' if near else "")
    for name, info in known.items():
        if name not in data and info.default is MISSING and info.default_factory is MISSING:
            yield f"{name} is missing"


def _problems_of(name: str, value: Any) -> list[str]:
    if name in ("name", "link", "versions"):
        return [] if isinstance(value, str) else [f"{name} should be text, found {value!r}"]
    if name in ("adamw_gparams", "attention_ms"):
        if not isinstance(value, Mapping) or not all(is_figure(v) and v > 0 for v in value.values()):
            return [f"{name} should map to positive numbers, found {value!r}"]
        if name == "adamw_gparams" and (not value or not all(_is_count(count) for count in value)):
            return [f"{name} should map numbers of threads to rates, found {value!r}"]
        return []
    if value is None and name in OPTIONAL:
        return []
    if not is_figure(value) or value < 0:
        return [f"{name} should be a number, found {value!r}"]
    if value == 0 and name not in MAY_BE_ZERO:
        return [f"{name} should be more than 0, found {value!r}"]
    return []


def is_figure(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_count(value: Any) -> bool:
    text = str(value)
    return text.isascii() and text.isdigit() and int(text) > 0


def load_machine(path: str | Path) -> Machine:
    """A machine from its file, YAML or JSON.

    Raises:
        UserError: The file is missing or not a machine file.
    """
    data = read_figures(path)
    if "gpus_per_node" in data:
        raise UserError(
            "is the file of a cluster, not of one machine", str(path), "plan for it with --world and engine: mesh"
        )
    return machine_from(data, str(path))


def read_figures(path: str | Path) -> dict[str, Any]:
    """The fields of a machine's or a cluster's file, YAML or JSON, as they are written.

    Raises:
        UserError: The file is missing or holds no fields.
    """
    file = Path(path)
    try:
        data = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", str(file), near_paths(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", str(file), "give the path of a machine file") from None
    except YAMLError as error:
        raise UserError(f"is not valid YAML: {str(error).splitlines()[0]}", str(file)) from None
    if not isinstance(data, dict):
        raise UserError("should hold the fields of a machine", str(file), "docs/machines has examples")
    return data
