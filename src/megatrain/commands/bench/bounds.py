"""What a step would take if nothing had to wait, measured on the same layers.

[Note: the bounds]
`bound` is what the same compiled layers and head take when nothing is computed twice, nothing moves and nothing is updated: one
layer of each template group, weights on the device, everything kept, forward and backward of a step's rows, times the group's
layers; plus the head (logits and cross entropy, in the engine's chunks) and the embedding. `policy bound` is the same with each
layer's policy and chunks from the plan, recompute included. Both are measured in the same process, after the engine has given its
memory back. The layer runs back to back, as often as the model has layers, on random numbers: at its power limit a GPU lowers its
clock, so that a short burst, or gradients that are all ones, is a tenth faster than any training step can be.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatrain.commands.bench.report import Report, Say
from megatrain.device.attention import attention_order, fastest_attention
from megatrain.engine.objective import cross_entropy_sum
from megatrain.machine.probe import device_seconds, sustained_seconds
from megatrain.models.build import fp32_parameter_names
from megatrain.models.shell import Shell
from megatrain.models.structure import Structure, attention_shape
from megatrain.models.templates import LayerCode, Variant
from megatrain.planner.choice import SELECTIVE_BUDGET, Policy
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Plan

logger = logging.getLogger(__name__)

BOUND_TOKENS = 32768
"""Most tokens that a bound computes together."""


def measure_bounds(report: Report, structure: Structure, model: ModelShape, made: Plan | None, say: Say) -> None:
    """See [Note: the bounds]. Runs out of memory on a full device are said, and leave the bounds out.

    Args:
        report: Of the steps, which have been measured; gets the bounds.
        structure, model: The shape.
        made: The plan that the steps followed, None on a CPU.
        say: Where text for people goes.
    """
    on = torch.device(report.device)
    try:
        bench_layers = _LayerClock(structure, model, on, report.tokens)
        edges = _edge_seconds(structure, on, report, made)
        say(f"embedding and head: {edges:.3f} s")
        report.bound = edges + _bound_of_layers(bench_layers, model, report, say)
        say(f"bound: {report.bound:.3f} s")
        if made is not None:
            report.policy_bound = edges + _policy_bound_of_layers(bench_layers, model, made, say)
        elif _default_recompute(report):
            report.policy_bound = edges + _recompute_bound(bench_layers, model, report)
        if report.policy_bound is not None:
            say(f"policy bound: {report.policy_bound:.3f} s")
    except torch.OutOfMemoryError as error:
        logger.warning("the bounds were not measured: %s", str(error).splitlines()[0])
    finally:
        release()


def _default_recompute(report: Report) -> bool:
    given = report.options.get("activations", "recompute")
    return {"keep", "selective"}.isdisjoint(given.values() if isinstance(given, dict) else [given])


def release() -> None:
    """Give the device's memory back that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _LayerClock:
    """Seconds of a layer of each template group, weights on the device, for given rows and policy.

    Layers of all groups get the arguments of the first layer: same shapes, maybe another mask.
    """

    def __init__(self, structure: Structure, model: ModelShape, device: torch.device, tokens: int):
        self._structure, self._model, self._device, self._tokens = structure, model, device, tokens
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._buffers = {name: buffer.to(device) for name, buffer in structure.model.named_buffers()}
        self._known: dict[tuple[int, int, Policy], float] = {}
        self._codes: dict[int, LayerCode] = {}
        config: Any = structure.model.config
        self._attention = attention_order(attention_shape(config.get_text_config()), tokens, self._dtype, device)

    def seconds(self, group: int, rows: int, policy: Policy) -> float:
        """Forward and backward of `rows` rows at once, with what the policy computes again."""
        key = (group, rows, policy)
        if key not in self._known:
            with fastest_attention(self._attention):
                self._known[key] = self._measured(group, rows, policy)
            release()
        return self._known[key]

    def _measured(self, group: int, rows: int, policy: Policy) -> float:
        from megatrain.planner.model_cost import layer_arguments

        index = self._model.groups.index(group)
        unit = self._structure.layers[index]
        code = self._code(group, index)
        flat = (torch.randn(unit.layout.numel, device=self._device) * 0.02).to(self._dtype)
        weights = {name: view.requires_grad_() for name, view in unit.layout.views(flat).items()}
        bound = {**weights, **self._layer_buffers(unit.prefix)}
        ids = torch.zeros((rows, self._tokens), dtype=torch.int64, device=self._device)
        args, kwargs = layer_arguments(self._structure, ids, self._buffers)
        args, kwargs, hidden = _with_random_hidden(args, kwargs, self._dtype)
        random_gradient = torch.randn_like(hidden) * 1e-4

        def once(variant: Variant) -> None:
            outputs = [o for o in pytree.tree_leaves(code(variant, bound, args, kwargs)) if isinstance(o, torch.Tensor)]
            outputs = [o for o in outputs if o.requires_grad]
            gradients = [random_gradient if o.shape == hidden.shape else torch.ones_like(o) for o in outputs]
            torch.autograd.grad(outputs, [hidden, *weights.values()], gradients, allow_unused=True)

        def layer() -> None:
            if policy == "recompute":
                with torch.no_grad():
                    code("forward", bound, args, kwargs)
            once(policy)

        return sustained_seconds(layer, self._device, len(self._model.groups))

    def _code(self, group: int, index: int) -> LayerCode:
        if group not in self._codes:
            module = self._structure.layer_stack()[index]
            compiled = self._device.type == "cuda"
            self._codes[group] = LayerCode(module, f"bound_{group}", compiled, SELECTIVE_BUDGET)
        return self._codes[group]

    def _layer_buffers(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): b for name, b in self._buffers.items() if name.startswith(prefix)}


def _with_random_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """The arguments in the compute type, with random hidden states (the first (B, T, D) floats) that want a gradient."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    hidden = None
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[i] = leaf.to(dtype)
            if hidden is None and leaf.ndim == 3:
                hidden = leaves[i] = torch.randn_like(leaves[i]).requires_grad_()
    assert hidden is not None, "the layer gets no hidden states"
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs, hidden


def _bound_of_layers(clock: _LayerClock, model: ModelShape, report: Report, say: Say) -> float:
    """Everything kept, as many rows at once as `BOUND_TOKENS` and the device's memory allow."""
    together = max(1, min(report.rows, BOUND_TOKENS // report.tokens))
    while True:
        try:
            chunks = report.rows / together
            total = 0.0
            for group in sorted(set(model.groups)):
                seconds = clock.seconds(group, together, "keep") * chunks
                say(
                    f"a layer of group {group}, {together} rows together, all kept: {seconds * 1e3:.1f} ms for the step"
                )
                total += seconds * model.groups.count(group)
            return total
        except torch.OutOfMemoryError:
            if together == 1:
                raise
            together //= 2
            logger.warning("the bound does not fit with %d rows together; trying %d", together * 2, together)
            release()


def _policy_bound_of_layers(clock: _LayerClock, model: ModelShape, made: Plan, say: Say) -> float:
    rows = -(-made.step.rows // made.choice.accumulation_steps)
    chunk = -(-rows // -(-rows // made.choice.microbatch_rows))
    chunks = made.step.rows / chunk
    total = 0.0
    kinds: set[tuple[int, Policy]] = {(model.groups[i], policy) for i, policy in enumerate(made.choice.policies)}
    for group, policy in sorted(kinds):
        seconds = clock.seconds(group, chunk, policy) * chunks
        layers = sum((model.groups[i], p) == (group, policy) for i, p in enumerate(made.choice.policies))
        say(
            f"{layers} layers of group {group}, {chunk} rows together, {policy}: {seconds * 1e3:.1f} ms each for the step"
        )
        total += seconds * layers
    return total


def _recompute_bound(clock: _LayerClock, model: ModelShape, report: Report) -> float:
    together = max(1, min(report.rows, report.options.get("microbatch_rows") or BOUND_TOKENS // 2 // report.tokens))
    chunks = report.rows / together
    return sum(clock.seconds(group, together, "recompute") * chunks for group in model.groups)


def _edge_seconds(structure: Structure, device: torch.device, report: Report, made: Plan | None) -> float:
    """Embedding, forward and backward, and the head over all targets, in the engine's token chunks."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    buffers = {name: buffer.to(device) for name, buffer in structure.model.named_buffers()}
    fp32 = frozenset(fp32_parameter_names(structure.model, dtype))  # type: ignore[arg-type]
    shell = Shell(structure, buffers, _no_layer, fp32)
    weights = {
        name: (torch.randn(entry.shape, device=device) * 0.02)
        .to(torch.float32 if name in fp32 else dtype)
        .requires_grad_()
        for unit in (structure.embedding, structure.head)
        for entry, (_, name) in zip(unit.layout.entries, unit.full_names(), strict=True)
    }
    config: Any = structure.model.config
    text = config.get_text_config()
    count = report.rows * (report.tokens - 1)
    asked = report.options.get("head_chunk_tokens") or (made.choice.head_chunk_tokens if made else 4096)
    chunk = min(asked, count)
    hidden_ND = torch.randn(chunk, text.hidden_size, device=device, dtype=dtype).requires_grad_()
    labels_N = torch.randint(0, text.vocab_size, (chunk,), device=device)
    entropy = torch.compile(cross_entropy_sum, dynamic=False) if cuda else cross_entropy_sum
    trained = [weights[name] for name in shell.head_names]

    def head() -> None:
        loss = entropy(shell.logits(weights, hidden_ND), labels_N)
        torch.autograd.grad(loss, [hidden_ND, *trained], allow_unused=True)

    table_name = max(structure.embedding.layout.entries, key=lambda entry: entry.numel).name
    ids = torch.randint(0, text.vocab_size, (report.rows, report.tokens), device=device)

    def embedding() -> None:
        found = torch.nn.functional.embedding(ids, weights[table_name])
        torch.autograd.grad(found, weights[table_name], torch.ones_like(found))

    return sustained_seconds(head, device, -(-count // chunk)) * count / chunk + device_seconds(embedding, device)


def _no_layer(*_: Any) -> Any:
    raise AssertionError("the head calls no layer")
