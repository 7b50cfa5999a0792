"""One GPU with the host engine, to compare a mesh layout with: more GPUs do not make a small model faster.

[Note: one GPU of a cluster]
A cluster's file says nothing of its hosts. A model for which the comparison matters has room on one GPU with all its state, so
the host engine is planned with as much host memory as it asks for, and with a host's default rates.

[Note: GPUs of this machine]
The link between them is not measured. They are taken for a node with a fast link (`LINK_GBPS`): then the seconds of a layout are
the fewest that this machine can reach, and a layout that is forecast to be slower than something else, is slower.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.errors import PlanRefused
from megatrain.machine.machine import Cluster, Machine
from megatrain.planner.cluster.candidate import Request
from megatrain.planner.cluster.estimate import Estimate
from megatrain.planner.plan import Options
from megatrain.planner.run import caps_for, plan_step
from megatrain.units import counted

LINK_GBPS = 360.0
"""NVLink 4 as reached by collectives, per GPU and direction."""
ENOUGH_HOST_GIB = 1e6
ADAMW_BYTES = 30
"""Bytes of GPU memory that AdamW reads and writes for a parameter (measured on an H200: 138e9 parameters/s at 4,100 GB/s)."""


def machine_of(cluster: Cluster) -> Machine:
    """One GPU of a cluster; see [Note: one GPU of a cluster]."""
    return Machine(
        name=cluster.name,
        device_gib=cluster.device_gib,
        host_gib=ENOUGH_HOST_GIB,
        cores=1,
        h2d_gbps=cluster.to_host_gbps,
        d2h_gbps=cluster.to_host_gbps,
        both_gbps=cluster.to_host_gbps,
        device_adamw_gparams=cluster.device_bandwidth_gbps / ADAMW_BYTES,
        matrix_tflops=cluster.matrix_tflops,
        device_bandwidth_gbps=cluster.device_bandwidth_gbps,
        attention_tflops=cluster.attention_tflops,
        attention_long_tflops=cluster.attention_long_tflops,
    )


def cluster_of(machine: Machine, gpus_per_node: int) -> Cluster:
    """Nodes of GPUs like this machine's; see [Note: GPUs of this machine]."""
    return Cluster(
        name=machine.name,
        gpus_per_node=gpus_per_node,
        device_gib=machine.device_gib,
        peak_tflops=machine.matrix_tflops,
        matrix_tflops=machine.matrix_tflops,
        attention_tflops=machine.attention_tflops,
        attention_long_tflops=machine.attention_long_tflops or machine.attention_tflops,
        device_bandwidth_gbps=machine.device_bandwidth_gbps,
        node_gbps=LINK_GBPS,
        network_gbps=LINK_GBPS / 8,
        to_host_gbps=machine.both_gbps,
    )


def one_gpu_tokens_per_s(request: Request, machine: Machine | None = None) -> float | None:
    """Forecast of the host engine on one GPU, for the same step; None if it does not fit.

    `machine`: the GPU with its host; None: one of the request's cluster.
    """
    compute = "fp32" if request.compute_bytes == 4 else "bf16"
    options = Options(compute=compute, compiled=request.overheads.compiled != "none", optim=request.optim)
    options = replace(options, transport_bytes=4 if compute == "fp32" else 2)
    machine = machine or machine_of(request.cluster)
    try:
        return plan_step(request.inventory.shape, machine, request.step, caps_for(machine), options).tokens_per_s
    except PlanRefused:
        return None


def slower_than_one_gpu(estimate: Estimate, one_gpu: float | None, world: int) -> str | None:
    """The line that says so, with both forecasts; None if the layout is faster, or one GPU is too small."""
    if one_gpu is None or estimate.tokens_per_s >= one_gpu:
        return None
    return (
        f"{estimate.tokens_per_s:,.0f} tokens/s on {counted(world, 'GPU')} are fewer than the {one_gpu:,.0f} of one GPU with "
        "engine: host (forecasts)"
    )
