"""`host_engine`: a HostEngine from one flat set of keywords, for the engine, its plan and its debug settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.instruments import Debug
from megatrain.engine.plan import ExecutionPlan

PLAN, DEBUG = ({field.name for field in fields(kind)} for kind in (ExecutionPlan, Debug))
POLICIES = ("keep", "selective", "keep_attention", "keep_mlp")


def host_engine(model: Any, **words: Any) -> HostEngine:
    """An engine. Keywords are those of `plan_of`, fields of `Debug`, or arguments of `HostEngine`."""
    rest = {name: words.pop(name) for name in list(words) if name not in (*PLAN, *POLICIES, "resident")}
    debug = {name: rest.pop(name) for name in list(rest) if name in DEBUG}
    return HostEngine(model, plan_of(**words), **rest, **({"debug": Debug(**debug)} if debug else {}))


def plan_of(**words: Any) -> ExecutionPlan:
    """A plan. Keywords are its fields, `resident` (unit names or "all") and policies (layers or "all": `keep=[0, 1]`).

    `offload_input` takes layers or "all", too.
    """
    if (resident := words.pop("resident", None)) is not None:
        words["placement"] = "device" if resident == "all" else dict.fromkeys(resident, "device")
    if (offload := words.get("offload_input")) is not None:
        words["offload_input"] = offload == "all" or frozenset(offload)
    chosen = {policy: words.pop(policy) for policy in POLICIES if policy in words}
    whole = [policy for policy, layers in chosen.items() if layers == "all"]
    if whole:
        words["activations"] = whole[-1]
    elif chosen:
        words["activations"] = {layer: policy for policy, layers in chosen.items() for layer in layers}
    return ExecutionPlan(**words)
