"""Time of a step in which nothing has to wait, measured on the same layers.

[Note: the bounds]
`bound` is the time of the same compiled layers and head without recompute, transfers and updates: one layer of each template
group with weights on the device and everything kept, forward and backward of a step's rows, times the group's layers; plus the
head (logits and cross entropy, in the engine's chunks) and the embedding. `policy bound` is the same with each layer's policy and
microbatches from the plan, recompute included. Both are measured in the same process, after the engine has freed its memory. A
layer runs back to back, once per layer of the model, on random numbers: at its power limit a GPU lowers its clock, so a short
burst, or gradients that are all ones, is a tenth faster than any training step can be.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatrain.commands.work import Work
from megatrain.device.attention import attention_order, fastest_attention
from megatrain.engine.objective import cross_entropy_sum
from megatrain.engine.plan import ExecutionPlan, Policy
from megatrain.machine.timing import device_seconds, sustained_seconds
from megatrain.models.shell import Shell
from megatrain.models.structure import Structure, attention_shape, fp32_parameter_names
from megatrain.models.templates import LayerCode, Variant
from megatrain.planner.model_cost import Arguments, ModelShape, layer_arguments
from megatrain.planner.plan import SELECTIVE_BUDGET, Cut, Plan

logger = logging.getLogger(__name__)

BOUND_TOKENS = 32768
"""Most tokens that a bound computes together."""


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Bounds:
    """Measures `bound` and `policy_bound` [s] of a step, None if not measured; see [Note: the bounds].

    `followed`: the engine's plan; `made`: the planner's, None on a CPU.
    """

    def __init__(
        self,
        work: Work,
        structure: Structure,
        model: ModelShape,
        device: torch.device,
        followed: ExecutionPlan,
        made: Plan | None,
    ):
        self.bound: float | None = None
        self.policy_bound: float | None = None
        self._structure, self._model, self._made, self._say = structure, model, made, work.say
        self._rows, self._tokens, self._device, self._followed = work.rows, work.tokens, device, followed
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._buffers = {name: buffer.to(device) for name, buffer in structure.model.named_buffers()}
        self._known: dict[tuple[int, int, Policy], float] = {}
        self._codes: dict[int, LayerCode] = {}
        config: Any = structure.model.config
        self._text = config.get_text_config()
        self._attention = attention_order(attention_shape(self._text), work.tokens, self._dtype, device)

    def measure(self) -> None:
        """Measure both bounds. Device OOM is a warning and leaves the bounds out."""
        try:
            edges_s = self._edges_s()
            self._say(f"embedding and head: {edges_s:.3f} s")
            self.bound = edges_s + self._layers_s()
            self._say(f"bound: {self.bound:.3f} s")
            layers_s = self._policy_layers_s()
            if layers_s is not None:
                self.policy_bound = edges_s + layers_s
                self._say(f"policy bound: {self.policy_bound:.3f} s")
        except torch.OutOfMemoryError as error:
            logger.warning("the bounds were not measured: %s", str(error).splitlines()[0])
        finally:
            release()

    def _layers_s(self) -> float:
        """All layers with everything kept, in microbatches as large as `BOUND_TOKENS` and the device's memory allow."""
        groups = self._model.groups
        together = max(1, min(self._rows, BOUND_TOKENS // self._tokens))
        while True:
            try:
                total = 0.0
                for group in sorted(set(groups)):
                    seconds = self._layer_s(group, together, "keep") * self._rows / together
                    each = f"{together} rows together, keep: {seconds * 1e3:.1f} ms per step"
                    self._say(f"a layer of group {group}, {each}")
                    total += seconds * groups.count(group)
                return total
            except torch.OutOfMemoryError:
                if together == 1:
                    raise
                together //= 2
                logger.warning("the bound does not fit with %d rows together; trying %d", together * 2, together)
                release()

    def _policy_layers_s(self) -> float | None:
        """All layers with the policies of the plan; without a plan only if all are recomputed, else None."""
        groups = self._model.groups
        if self._made is None:
            if self._followed.activations != "recompute":
                return None
            rows = self._followed.microbatch_rows or BOUND_TOKENS // 2 // self._tokens
            microbatch_rows = max(1, min(self._rows, rows))
            kinds: list[tuple[int, Policy]] = [(group, "recompute") for group in groups]
        else:
            cut = Cut.of(self._made.step, self._made.choice)
            microbatch_rows = cut.microbatch_tokens // self._tokens
            kinds = list(zip(groups, self._made.choice.policies, strict=True))
        total = 0.0
        for group, policy in sorted(set(kinds)):
            seconds = self._layer_s(group, microbatch_rows, policy) * self._rows / microbatch_rows
            layers = kinds.count((group, policy))
            each = f"{microbatch_rows} rows together, {policy}: {seconds * 1e3:.1f} ms each per step"
            self._say(f"{layers} layers of group {group}, {each}")
            total += seconds * layers
        return total

    def _layer_s(self, group: int, rows: int, policy: Policy) -> float:
        """Forward and backward of `rows` rows together, recompute included; weights on the device.

        Layers of all groups get the arguments of the first layer: same shapes, maybe another mask.
        """
        key = (group, rows, policy)
        if key not in self._known:
            with fastest_attention(self._attention):
                self._known[key] = self._measured(group, rows, policy)
            release()
        return self._known[key]

    def _measured(self, group: int, rows: int, policy: Policy) -> float:
        index = self._model.groups.index(group)
        unit = self._structure.layers[index]
        if group not in self._codes:
            module = self._structure.layer_stack()[index]
            self._codes[group] = LayerCode(module, f"bound_{group}", self._device.type == "cuda", SELECTIVE_BUDGET)
        code = self._codes[group]
        flat = (torch.randn(unit.layout.numel, device=self._device) * 0.02).to(self._dtype)
        weights = {name: view.requires_grad_() for name, view in unit.layout.views(flat).items()}
        prefix = unit.prefix
        buffers = {name.removeprefix(prefix): b for name, b in self._buffers.items() if name.startswith(prefix)}
        bound = {**weights, **buffers}
        ids_BT = torch.zeros((rows, self._tokens), dtype=torch.int64, device=self._device)
        arguments = layer_arguments(self._structure, ids_BT, self._buffers)
        (args, kwargs), hidden_BTD = _with_random_hidden(arguments, self._dtype)
        random_gradient_BTD = torch.randn_like(hidden_BTD) * 1e-4

        def once(variant: Variant) -> None:
            outputs = [o for o in pytree.tree_leaves(code(variant, bound, args, kwargs)) if isinstance(o, torch.Tensor)]
            outputs = [o for o in outputs if o.requires_grad]
            gradients = [random_gradient_BTD if o.shape == hidden_BTD.shape else torch.ones_like(o) for o in outputs]
            torch.autograd.grad(outputs, [hidden_BTD, *weights.values()], gradients, allow_unused=True)

        def layer() -> None:
            if policy == "recompute":
                with torch.no_grad():
                    code("forward", bound, args, kwargs)
            once(policy)

        return sustained_seconds(layer, self._device, len(self._model.groups))

    def _edges_s(self) -> float:
        """Forward and backward of the embedding, and of the head over all targets in the engine's token chunks."""
        device, dtype, structure = self._device, self._dtype, self._structure
        fp32 = frozenset(fp32_parameter_names(structure.model, dtype))  # type: ignore[arg-type]
        shell = Shell(structure, self._buffers, _no_layer, fp32)
        weights: dict[str, torch.Tensor] = {}
        for unit in (structure.embedding, structure.head):
            for entry, (_, name) in zip(unit.layout.entries, unit.full_names(), strict=True):
                random = torch.randn(entry.shape, device=device) * 0.02
                weights[name] = random.to(torch.float32 if name in fp32 else dtype).requires_grad_()
        count = self._rows * (self._tokens - 1)
        chunk = min(self._followed.head_chunk_tokens or 4096, count)
        hidden_ND = torch.randn(chunk, self._text.hidden_size, device=device, dtype=dtype).requires_grad_()
        labels_N = torch.randint(0, self._text.vocab_size, (chunk,), device=device)
        cuda = device.type == "cuda"
        entropy = torch.compile(cross_entropy_sum, dynamic=False) if cuda else cross_entropy_sum
        trained = [weights[name] for name in shell.head_names]

        def head() -> None:
            loss = entropy(shell.logits(weights, hidden_ND), labels_N)
            torch.autograd.grad(loss, [hidden_ND, *trained], allow_unused=True)

        table = weights[max(structure.embedding.layout.entries, key=lambda entry: entry.numel).name]
        ids_BT = torch.randint(0, self._text.vocab_size, (self._rows, self._tokens), device=device)

        def embedding() -> None:
            found = torch.nn.functional.embedding(ids_BT, table)
            torch.autograd.grad(found, table, torch.ones_like(found))

        head_s = sustained_seconds(head, device, -(-count // chunk)) * count / chunk
        return head_s + device_seconds(embedding, device)


def _with_random_hidden(arguments: Arguments, dtype: torch.dtype) -> tuple[Arguments, torch.Tensor]:
    """The arguments in the compute dtype, and their hidden states (the first (B, T, D) floats), random and with gradient."""
    leaves, spec = pytree.tree_flatten(arguments)
    hidden_BTD = None
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[i] = leaf.to(dtype)
            if hidden_BTD is None and leaf.ndim == 3:
                hidden_BTD = leaves[i] = torch.randn_like(leaves[i]).requires_grad_()
    assert hidden_BTD is not None, "the layer gets no hidden states"
    return pytree.tree_unflatten(leaves, spec), hidden_BTD


def _no_layer(*_: Any) -> Any:
    raise AssertionError("the head calls no layer")
