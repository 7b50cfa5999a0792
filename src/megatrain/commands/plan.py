"""`megatrain plan`: print the plan of a run, or the parallel layouts of a cluster."""

from __future__ import annotations

from megatrain.config.schema import RunConfig
from megatrain.errors import UserError
from megatrain.machine.machine import read_figures


def plan_report(run: RunConfig, *, machine: str | None, world: int | None, as_json: bool) -> str:
    """The plan as text or JSON.

    Args:
        run: The config.
        machine: A machine file; None: this machine.
        world: Number of GPUs whose layouts are ranked; None: plan for the host engine.
        as_json: Return JSON.

    Raises:
        UserError: The machine file is missing or wrong.
        PlanRefused: The run does not fit.
    """
    if machine is not None:
        read_figures(machine)  # report a wrong file before the imports below, which take seconds
    if world is None:
        from megatrain.planner.report import plan_json, plan_text
        from megatrain.planner.run import plan_run

        made = plan_run(run, machine_file=machine)
        return plan_json(made) if as_json else plan_text(made)
    from megatrain.planner.cluster.plan import plan_cluster_run
    from megatrain.planner.cluster.report import cluster_json, cluster_text

    if machine is None:
        raise UserError(
            "needs the figures of a cluster", "--world", "give --machine FILE (docs/machines/h100-cluster.yaml is one)"
        )
    made = plan_cluster_run(run, machine_file=machine, world=world)
    return cluster_json(made) if as_json else cluster_text(made)
