"""From a run's config, a model folder or a model's shape to a plan: `megatrain plan`, and what `train` follows on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain.config.schema import RunConfig
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import PlanRefused, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.machine.machine import Machine, load_machine
from megatrain.models.trainable import Trainable
from megatrain.optim.configured import optimizer
from megatrain.planner.keep import differences, keep
from megatrain.planner.memory import device_peak, disk_lines, host_lines
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.planner.plan import Caps, Choice, Limits, Options, Plan, PlanRequest, StepSize, usable_device_bytes
from megatrain.planner.report import refusal
from megatrain.planner.search import Search
from megatrain.planner.timeline import simulate
from megatrain.units import GIB, DtypeName

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def plan(
    source: RunConfig | str | Path,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    trust_remote_code: bool = False,
) -> ExecutionPlan:
    """The fastest plan for this machine: `HostEngine(folder, megatrain.plan(folder, rows=32, tokens=1024))`.

    Without a GPU nothing is planned: the answer is `ExecutionPlan()`, or what the config says.

    Args:
        source: A run config, or a model folder (or cached hub id) with `rows` and `tokens`.
        rows: Rows of an optimizer step.
        tokens: Tokens of a row.
        trust_remote_code: Whether code in the model folder may run.

    Raises:
        UserError: The model is not usable.
        PlanRefused: The step does not fit this machine.
    """
    import torch

    from megatrain.machine.probe import probe
    from megatrain.models.build import find_model_folder, load_model_config

    if isinstance(source, RunConfig):
        return execution_plan(source)
    if rows is None or tokens is None:
        raise UserError("rows and tokens are needed to plan for a model", "megatrain.plan")
    folder = find_model_folder(source)
    config = load_model_config(folder, trust_remote_code)
    if not torch.cuda.is_available():
        return ExecutionPlan()
    machine, shape = probe("auto"), shape_of(config, name=folder.name, trust_remote_code=trust_remote_code)
    return plan_step(shape, machine, StepSize(rows, tokens), available_caps(machine)).execution


def execution_plan(
    run: RunConfig, *, training: bool = True, total_steps: int | None = None, made: Plan | None = None
) -> ExecutionPlan:
    """How the host engine computes a run: as planned on a GPU, as the config says on a CPU and in an evaluation.

    Args:
        run: The config.
        training: False for an evaluation, which needs no gradient planes.
        total_steps: Length of the run, if it is known better than from `schedule.steps`.
        made: The run's plan, if it was made already; on a GPU it is made now otherwise.

    Raises:
        UserError, PlanRefused: As `plan_run`.
    """
    import torch

    memory, precision = run.memory, run.precision
    unplanned_replicas = hosts_of_job() if run.run.replicate_hosts is True else 1
    if not training:
        plan = ExecutionPlan(
            microbatch_rows=run.batch.microbatch_rows,
            head_chunk_tokens=run.batch.head_chunk_tokens,
            # the engine requires the plane with fp16, although an evaluation never uses it
            gradient_plane=memory.gradient_plane and precision.compute_dtype == "fp16",
            compile=run.activations.compile,
            threads=run.run.threads,
            replicas=unplanned_replicas,
        )
    elif run.run.device != "cpu" and torch.cuda.is_available():
        plan = (made or plan_run(run, total_steps=total_steps)).execution
    else:
        plan = replace(options_of(run).execution(), replicas=unplanned_replicas)
    return replace(
        plan,
        pin=memory.pin,
        compute_dtype=precision.compute_dtype,
        grad_transport=precision.grad_transport,
        attn_implementation=run.model.attn_implementation,
        host_gib=None if memory.host_gib == "auto" else memory.host_gib,
        device_gib=None if memory.device_gib == "auto" else memory.device_gib,
    )


def plan_run(
    run: RunConfig,
    *,
    machine_file: str | Path | None = None,
    total_steps: int | None = None,
    then: Mapping[str, Any] | None = None,
    compare: bool = False,
) -> Plan:
    """Plan a run from its config and the model's config.

    Args:
        run: The config.
        machine_file: A machine file; None: this machine, with its available memory.
        total_steps: Length of the run, if it is known better than from `schedule.steps`.
        then: What the checkpoint that the run resumes from remembers of its plan, which is kept where it fits; see keep.py.
        compare: Also predict the speed with other numbers of GPUs, up to those that the run uses.

    Raises:
        UserError: The model or the machine file is not usable, or this machine has no GPU.
        PlanRefused: Nothing fits.
    """
    from megatrain.machine.probe import probe
    from megatrain.models.build import find_model_folder, load_model_config

    folder = find_model_folder(run.model.path)
    config = load_model_config(folder, run.model.trust_remote_code)
    memory = run.memory
    if machine_file is not None:
        machine = load_machine(machine_file)
        if machine.device_gib == 0:
            raise UserError("has no GPU to plan for", f"{machine_file}: device_gib", "give the memory of a GPU")
        host_bytes, device_bytes = int(machine.host_gib * GIB), int(machine.device_gib * GIB)
        hosts = machine.hosts
        ranks = hosts * (machine.gpus if run.run.gpus == "auto" else run.run.gpus)
    else:
        ranks, hosts = ranks_of(run), hosts_of_job()
        machine = probe("cuda" if run.run.device == "cuda" else "auto")
        if machine.device_gib == 0:
            remedy = "give a machine with one by --machine FILE (docs/machines); on a CPU training needs no plan"
            raise UserError("this machine has no GPU to plan for", "plan", remedy)
        host_bytes, device_bytes = available_host_bytes(), free_device_bytes(machine)
    limits = Limits(
        host_bytes,
        device_bytes,
        host_reserve_gib=memory.host_reserve_gib,
        host_gib=memory.host_gib,
        device_gib=memory.device_gib,
        device_fraction=memory.device_fraction,
    )
    shape, step = _shape_of_run(run, config, folder.name), StepSize(run.rows_per_step, run.data.max_tokens)
    if run.engine == "mesh":
        ranks = hosts = 1
    steps = total_steps or run.schedule.steps

    def request(count: int) -> PlanRequest:
        options = replace(options_of(run), ranks=count, hosts=-(-count // (ranks // hosts)))
        return request_of(shape, machine, step, limits.caps, options, limits)

    made = _planned(request(ranks), steps) if then is None else _resumed(request(ranks), run, then, steps)
    scaling: dict[int, float | None] = {}
    per_host = ranks // hosts
    for count in (n for n in range(1, ranks + 1) if compare and ranks > 1 and (n == ranks or n.bit_count() == 1)):
        if count > per_host and count % per_host:
            continue
        best = Search(with_replicas(request(count))).best()
        scaling[count] = None if best is None else step.all_tokens / best.seconds
    mesh = ("engine: mesh: this plans one GPU with the host engine; --world N ranks the layouts of N GPUs",)
    warnings = (*(mesh if run.engine == "mesh" else ()), *warnings_of(run, config))
    return replace(made, scaling=scaling, warnings=warnings)


def ranks_of(run: RunConfig) -> int:
    """Processes that share a run's state: of torchrun, or those that `run.gpus` starts on this host."""
    import torch

    from megatrain.engine.mesh import launch

    if launch.world_size() > 1 or run.run.gpus == 1:
        return launch.world_size()
    return max(1, torch.cuda.device_count()) if run.run.gpus == "auto" else run.run.gpus


def hosts_of_job() -> int:
    """Hosts of torchrun's processes."""
    from megatrain.engine.mesh import launch

    return max(1, launch.world_size() // launch.local_world_size())


def plan_step(
    shape: ModelShape,
    machine: Machine,
    step: StepSize,
    caps: Caps | None = None,
    options: Options | None = None,
    *,
    steps: int | None = None,
) -> Plan:
    """The fastest way to run a step within the caps. Pure.

    Args:
        shape: The model; see `shape_of`.
        machine: The machine, which must have a GPU.
        step: Rows and tokens of an optimizer step, of all ranks.
        caps: Bytes that may be used, of the host by all ranks together; by default everything the machine has.
        options: Decisions of the user.
        steps: Length of the run, for the total time.

    Raises:
        PlanRefused: Nothing fits. The message has the memory of the closest choice and ways to reduce it.
    """
    assert machine.device_gib > 0, f"{machine.name} has no GPU to plan for"
    caps, options = caps or caps_for(machine), options or Options()
    return _planned(request_of(shape, machine, step, caps, options), steps)


def request_of(
    shape: ModelShape, machine: Machine, step: StepSize, caps: Caps, options: Options, limits: Limits | None = None
) -> PlanRequest:
    """The request for one of `options.ranks` processes: its rows of the step, and its share of the host's memory."""
    if options.ranks == 1:
        return PlanRequest(shape, machine, step, caps, options, limits)
    share = StepSize(-(-step.rows // options.ranks), step.tokens)
    caps = replace(caps, host_bytes=caps.host_bytes // options.local_ranks)
    return PlanRequest(shape, machine, share, caps, options, all_rows=step.rows)


def with_replicas(request: PlanRequest) -> PlanRequest:
    """The request with one copy of the state on each host, or one for all hosts: as the user says, else the faster one."""
    options = request.options
    if options.hosts == 1:
        return request
    several, one = (replace(request, options=replace(options, replicas=count)) for count in (options.hosts, 1))
    if options.replicate_hosts != "auto":
        return several if options.replicate_hosts else one
    found = [(each, best.seconds) for each in (several, one) if (best := Search(each).best()) is not None]
    return min(found, key=lambda pair: pair[1])[0] if found else one


def _planned(request: PlanRequest, steps: int | None) -> Plan:
    request = with_replicas(request)
    best = Search(request).best()
    if best is None:
        raise PlanRefused(refusal(request))
    return plan_of(request, best.choice, steps)


def _resumed(request: PlanRequest, run: RunConfig, then: Mapping[str, Any], steps: int | None) -> Plan:
    """The plan of a resumed run: see [Note: the cut and the bits] in keep.py."""
    request = with_replicas(request)
    kept = keep(request, run, then)
    if kept.choice is not None:
        return replace(plan_of(request, kept.choice, steps), remarks=kept.remarks)
    made = _planned(request, steps)
    return replace(made, remarks=(*kept.remarks, *(differences(kept.old, made.choice) if kept.old else ())))


def plan_of(request: PlanRequest, choice: Choice, steps: int | None = None) -> Plan:
    """The plan of a given choice, whether or not it fits."""
    shape, machine, step, options = request.shape, request.machine, request.step, request.options
    device = device_peak(shape, step, options, choice)
    return Plan(
        model=shape.name,
        machine=machine.name,
        parameters=shape.parameters,
        step=StepSize(request.all_rows or step.rows, step.tokens),
        options=options,
        choice=choice,
        threads=options.threads or max(1, machine.threads // options.local_ranks),
        placement={name: "device" if choice.is_resident(name) else "host" for name in shape.unit_elements},
        host=host_lines(shape, step, options, choice),
        device=device.lines,
        disk=disk_lines(shape, options.optim),
        device_moment=device.moment,
        caps=request.caps,
        timeline=simulate(shape, machine, step, options, choice),
        steps=steps,
    )


def options_of(run: RunConfig, compute: DtypeName | None = None) -> Options:
    """Decisions in the config. The default of one accumulation step leaves their number to the planner."""
    if compute is None:
        compute = "bf16" if run.precision.compute_dtype == "auto" else run.precision.compute_dtype
    transport = run.precision.grad_transport
    if transport == "auto":
        transport = "fp32" if compute == "fp32" else "bf16"
    return Options(
        optim=optimizer(run),
        compute=compute,
        transport_bytes=4 if transport == "fp32" else 2,
        gradient_plane=run.memory.gradient_plane,
        compiled=run.activations.compile == "auto",
        policy=run.activations.layer_policy,
        accumulation_steps=run.batch.accumulation_steps if run.batch.accumulation_steps > 1 else None,
        microbatch_rows=run.batch.microbatch_rows,
        head_chunk_tokens=run.batch.head_chunk_tokens,
        mlp_chunk_tokens=run.activations.mlp_chunk_tokens,
        segment=run.activations.segment or 1,
        weight_slots=run.memory.weight_slots,
        gradient_slabs=run.memory.gradient_slabs,
        staged=run.memory.pin == "staged",
        threads=run.run.threads,
        offload_input=run.activations.offload_input,
        replicate_hosts=run.run.replicate_hosts,
    )


def warnings_of(run: RunConfig, config: PreTrainedConfig) -> tuple[str, ...]:
    """Problems that `check` refuses but planning ignores: rows longer than the model's positions."""
    from megatrain.models.build import known_positions

    positions, tokens = known_positions(config), run.data.max_tokens
    if positions is None or tokens <= positions:
        return ()
    longer = f"rows of {tokens:,} tokens are longer than the {positions:,} positions of the model"
    return (f"data.max_tokens: {longer}; check and train refuse them",)


def caps_for(
    machine: Machine,
    *,
    host_gib: float | None = None,
    device_gib: float | None = None,
    device_fraction: float | Literal["auto"] = "auto",
) -> Caps:
    """Memory of a machine within the user's limits; of the device, the share `device_fraction`."""
    host = machine.host_gib if host_gib is None else min(machine.host_gib, host_gib)
    device = machine.device_gib if device_gib is None else min(machine.device_gib, device_gib)
    return Caps(int(host * GIB), usable_device_bytes(int(device * GIB), device_fraction))


def available_caps(machine: Machine, device_fraction: float | Literal["auto"] = "auto") -> Caps:
    """Memory of this machine that is available to this process now; of the device, the share `device_fraction`."""
    return Caps(available_host_bytes(), usable_device_bytes(free_device_bytes(machine), device_fraction))


def free_device_bytes(machine: Machine) -> int:
    """Memory of this machine's GPU that is free now."""
    import torch

    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else int(machine.device_gib * GIB)
    return int(min(free, machine.device_gib * GIB))


def _shape_of_run(run: RunConfig, config: PreTrainedConfig, name: str | None = None) -> ModelShape:
    code = run.model.trust_remote_code
    attention, trained = run.model.attn_implementation, Trainable(run.train.freeze, run.train.only)
    return shape_of(config, name=name, attn_implementation=attention, trust_remote_code=code, trainable=trained)
