"""The steps that `bench` and `trace` run: a named shape with random weights and tokens, its plan and its engine."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatrain.engine.batches import BatchShape
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh import launch
from megatrain.engine.parity_check import token_wise
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import UserError
from megatrain.machine.gpus import stay_near_gpu
from megatrain.machine.machine import Machine, load_machine
from megatrain.machine.probe import probe
from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
from megatrain.models.structure import Structure, dissect
from megatrain.optim.adamw import AdamW
from megatrain.planner.model_cost import ModelShape, shape_of_structure
from megatrain.planner.plan import Caps, Options, Plan, StepSize
from megatrain.planner.report import plan_text
from megatrain.planner.run import available_caps, caps_for, plan_step
from megatrain.run.ranks import from_rank_0

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Takes a line of text."""
QWEN3 = {  # hidden, intermediate, layers, heads, kv heads, tied
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-17b": (5120, 17408, 48, 40, 8, False),
    "qwen3-18b": (5120, 17408, 50, 40, 8, False),
    "qwen3-20b": (5120, 17408, 56, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
    "tiny": (64, 128, 4, 4, 2, False),
}
"""17b, 18b and 20b are 14b with more layers; tiny is for trying the command out."""
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False, "max_position_embeddings": 1 << 20, "rope_theta": 1e6,
}  # fmt: skip
CONFIGS = {"qwen2.5-7b": QWEN25_7B}


def folder_of(shape: str, scratch: Path) -> Path:
    """A folder with the shape's config.json: the given folder, or `scratch` for a name; UserError if it is neither."""
    name = shape.lower()
    config = CONFIGS.get(name)
    if name in QWEN3:
        hidden, intermediate, layers, heads, kv_heads, tied = QWEN3[name]
        config = {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": 128 if hidden > 64 else 16,
            "vocab_size": 151936 if hidden > 64 else 512, "tie_word_embeddings": tied, "max_position_embeddings": 1 << 20,
        }  # fmt: skip
    if config is not None:
        (scratch / "config.json").write_text(json.dumps(config))
        return scratch
    if not Path(shape).exists():
        raise UserError(f"unknown shape or folder: {shape!r}", "bench", f"names are {', '.join([*QWEN3, *CONFIGS])}")
    return find_model_folder(shape)


def check_shape(shape: str) -> None:
    """UserError for an unknown shape."""
    with tempfile.TemporaryDirectory() as scratch:
        folder_of(shape, Path(scratch))


def structure_of(folder: Path, dtype: torch.dtype) -> Structure:
    """The model that the folder's config describes, without weights."""
    return dissect(build_meta_model(load_model_config(folder), compute_dtype=dtype))


@dataclass(frozen=True)
class Work:
    """Steps of a shape on this machine, and limits and overrides of their plan."""

    shape: str  # a name of `QWEN3` or `CONFIGS`, or a model folder (only its config is used)
    rows: int
    tokens: int  # of a row
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    device_gib: float | None = None  # memory limits, to simulate a smaller machine
    host_gib: float | None = None
    device_fraction: float | Literal["auto"] = "auto"  # share of the device's memory that the plan may fill
    machine_file: str | Path | None = None  # figures of the machine instead of a probe
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of `ExecutionPlan` that replace the plan's
    say: Say = logger.info
    ranks: int = 1  # processes that share the model's state, one GPU each; this process is one of them

    @property
    def is_main(self) -> bool:
        """Whether this process reports."""
        return self.ranks == 1 or launch.rank() == 0

    @property
    def device_here(self) -> torch.device | str:
        """This process's device."""
        return launch.device_of_rank(self.device) if self.ranks > 1 else self.device

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available())

    def machine(self) -> Machine | None:
        """The machine to plan for; None on a CPU without a machine file."""
        if self.machine_file is not None:
            return load_machine(self.machine_file)
        return probe(self.device) if self.on_gpu else None

    def planned(self, model: ModelShape, machine: Machine | None) -> Plan | None:
        """The plan, or None without a GPU to plan for; PlanRefused if the step does not fit."""
        if machine is None or machine.device_gib <= 0:
            return None
        fraction = self.device_fraction
        caps = caps_for(machine, host_gib=self.host_gib, device_gib=self.device_gib, device_fraction=fraction)
        if self.machine_file is None:
            free = available_caps(machine, fraction)
            caps = Caps(min(caps.host_bytes, free.host_bytes), min(caps.device_bytes, free.device_bytes))
        made = plan_step(model, machine, StepSize(self.rows, self.tokens), caps, Options(ranks=self.ranks))
        self.say(plan_text(made))
        return made

    def followed(self, made: Plan | None) -> ExecutionPlan:
        """The plan that the engine follows: limits and overrides applied."""
        plan = replace(made.execution if made else ExecutionPlan(), **self.overrides)
        device_gib = plan.device_gib or (self.device_gib if self.on_gpu else None)
        shape = BatchShape(self.rows, (self.tokens,))
        return replace(plan, device_gib=device_gib, host_gib=plan.host_gib or self.host_gib, train_shape=shape)

    def engine(self, folder: Path, plan: ExecutionPlan, init: Literal["random", "empty"] = "random") -> HostEngine:
        optim = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if plan.gradient_plane else None)
        group = dist.group.WORLD if self.ranks > 1 else None
        if group is not None:
            stay_near_gpu(torch.device(self.device_here), launch.local_world_size())
        return HostEngine(folder, plan, device=self.device_here, optim=optim, verify="never", init=init, group=group)


def planned(work: Work, scratch: Path) -> tuple[Path, Structure, ModelShape, Machine | None, Plan | None]:
    """The folder of a step's shape, its structure, the machine, and the plan; both of rank 0. `scratch`: see `folder_of`."""
    folder = folder_of(work.shape, scratch)
    structure = structure_of(folder, torch.bfloat16)
    model = shape_of_structure(structure, work.shape, token_wise(structure.model.config))  # type: ignore[arg-type]

    def plan() -> tuple[Machine | None, Plan | None]:
        machine = work.machine()
        return machine, work.planned(model, machine)

    return folder, structure, model, *from_rank_0(plan)


@contextlib.contextmanager
def engine_for(work: Work, init: Literal["random", "empty"] = "random") -> Iterator[HostEngine]:
    """The engine that `bench` measures. `empty` leaves the weights to a checkpoint that is loaded next."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, *_, made = planned(work, Path(scratch))
        with work.engine(folder, work.followed(made), init) as engine:
            yield engine


def random_batch(vocabulary: int, rows: int, tokens: int, step: int) -> dict[str, torch.Tensor]:
    """Rows of random tokens, all of them targets."""
    ids_BT = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids_BT, "labels": ids_BT.clone()}


def plan_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as fields of `ExecutionPlan`; a value is JSON or a plain word.

    `activations={"0": "keep"}` names layers, `placement={"head": "device"}` units, `offload_input=[0, 1]` layers.

    Raises:
        UserError: A plan has no such field, or the value is of another kind.
    """
    known = {field.name: str(field.type) for field in fields(ExecutionPlan)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f'; did you mean "{near[0]}{equals}{text}"?' if near and near[0] != name else ""
            what = f"{word!r} is not NAME=VALUE of ExecutionPlan{hint}"
            raise UserError(what, "--option", f"names are {', '.join(known)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if not _is_kind(value, known[name]):
            raise UserError(f"{name} should be {known[name].replace('None', 'null')}, found {text!r}", "--option")
        if name == "activations" and isinstance(value, dict):
            value = {int(layer): policy for layer, policy in value.items()}
        found[name] = frozenset(value) if isinstance(value, list) else value
    return found


def _is_kind(value: object, kind: str) -> bool:
    """Whether a JSON value fits a field with the annotation `kind`; the plan itself checks words."""
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int | float):
        return "float" in kind or ("int" in kind.split(" | ") and isinstance(value, int))
    names = {str: ("Literal", "Place", "Policy"), dict: ("Mapping",), list: ("frozenset",)}
    return any(name in kind for name in names[type(value)])
