"""Compute token-wise modules (the MLP, norms) of a long row in chunks of tokens.

[Note: chunks of tokens]
An MLP expands each token several times: at 262,144 tokens one such tensor takes 9 GiB. If an MLP is token-wise (each token is
computed independently), it can run in chunks: `TokenChunks.chunked_module` runs HF's own module on a few thousand tokens at a
time and saves only its input. Its backward recomputes each chunk and sums the weight gradients over the chunks in fp32, rounding
once at the end. Forward and backward are custom operators, so a compiled layer stays one graph with one operation of known
shape; the code inside the operators is compiled separately (`LayerCode`).

[Note: which modules are token-wise]
Whether a module is token-wise depends on its code; no name tells. So the module in a tiny copy of the model runs on some tokens
at once and on the same tokens in parts, and only if all parts match the whole is it computed in chunks. Modules that draw random
numbers stay whole: the parts would draw different numbers.

Shapes: B rows, T tokens, D hidden size; N = B x T, n tokens of a chunk.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain.models.structure import shallow_copy

logger = logging.getLogger(__name__)

ComputeChunk = Callable[[bool, Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]
"""(whether a backward follows, parameters and buffers by name, hidden (1, n, D)) -> (1, n, D)."""


class TokenChunks:
    """Computes one module (not changed) in chunks of at most `tokens` tokens, which may be changed between steps."""

    def __init__(self, module: nn.Module, compute: ComputeChunk, tokens: int):
        self.module = module
        self.compute = compute
        self.tokens = tokens
        self.names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        self.key = next(_KEYS)
        _KNOWN[self.key] = self

    def chunked_module(self) -> nn.Module:
        """Return a copy of the module, with the same parameters under the same names, that computes in chunks."""
        twin = shallow_copy(self.module)
        twin.forward = functools.partial(_forward, twin, self)  # type: ignore[method-assign]
        return twin

    def parts(self, count: int) -> Iterator[slice]:
        """Split `count` tokens into slices of nearly equal size."""
        size = -(-count // -(-count // self.tokens))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))


_KEYS = itertools.count()
_KNOWN: weakref.WeakValueDictionary[int, TokenChunks] = weakref.WeakValueDictionary()
"""Custom operators take only tensors and numbers, so they find their `TokenChunks` here by its key."""


def _forward(twin: nn.Module, chunks: TokenChunks, hidden_BTD: torch.Tensor) -> torch.Tensor:
    if hidden_BTD.shape[:-1].numel() <= chunks.tokens:
        return type(twin).forward(twin, hidden_BTD)
    state = [functools.reduce(getattr, name.split("."), twin) for name in chunks.names]
    return _in_chunks(hidden_BTD, state, chunks.key)


@torch.library.custom_op("megatrain::in_chunks", mutates_args=())
def _in_chunks(hidden_BTD: torch.Tensor, state: list[torch.Tensor], key: int) -> torch.Tensor:
    chunks = _KNOWN[key]
    # Detached, so that the module is compiled once for its forward, whether or not the caller's tensors need gradients.
    bound = {name: tensor.detach() for name, tensor in zip(chunks.names, state, strict=True)}
    x_ND = hidden_BTD.detach().reshape(-1, hidden_BTD.shape[-1])
    # Not a view: a family may modify the MLP's output in place, which autograd refuses for a view from a custom operator.
    y_BTD = torch.empty_like(hidden_BTD, memory_format=torch.contiguous_format)
    y_ND = y_BTD.view(x_ND.shape)
    with _autograd_enabled(), torch.no_grad():
        for part in chunks.parts(len(x_ND)):
            y_1nD = chunks.compute(False, bound, x_ND[part].unsqueeze(0))
            assert y_1nD.dtype == y_ND.dtype, f"{y_1nD.dtype} output for {y_ND.dtype} input"
            y_ND[part] = y_1nD[0]
    return y_BTD


@_in_chunks.register_fake
def _(hidden_BTD: torch.Tensor, state: list[torch.Tensor], key: int) -> torch.Tensor:
    return hidden_BTD.new_empty(hidden_BTD.shape)


@torch.library.custom_op("megatrain::in_chunks_backward", mutates_args=())
def _in_chunks_backward(
    d_out_BTD: torch.Tensor, hidden_BTD: torch.Tensor, state: list[torch.Tensor], key: int, trained: list[bool]
) -> list[torch.Tensor]:
    """Gradients of the hidden states and of the trained tensors in `state`."""
    chunks = _KNOWN[key]
    leaves = [tensor.detach().requires_grad_(on) for tensor, on in zip(state, trained, strict=True)]
    bound, wanted = dict(zip(chunks.names, leaves, strict=True)), [leaf for leaf in leaves if leaf.requires_grad]
    x_ND, d_out_ND = (t.reshape(-1, t.shape[-1]) for t in (hidden_BTD, d_out_BTD))
    d_x_ND = torch.empty_like(x_ND)
    sums: list[torch.Tensor | None] = [None] * len(wanted)
    with _autograd_enabled(), torch.enable_grad():
        for part in chunks.parts(len(x_ND)):
            x_1nD = x_ND[part].detach().unsqueeze(0).requires_grad_()
            y_1nD = chunks.compute(True, bound, x_1nD)
            d_x, *found = torch.autograd.grad(y_1nD, [x_1nD, *wanted], d_out_ND[part].unsqueeze(0), allow_unused=True)
            d_x_ND[part] = 0 if d_x is None else d_x[0]
            del y_1nD, x_1nD, d_x
            for i, gradient in enumerate(found):
                if gradient is not None:
                    total = sums[i]
                    sums[i] = gradient.float() if total is None else total.add_(gradient)
            del found
    whole = [
        torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if total is None else total.to(leaf.dtype)
        for leaf, total in zip(wanted, sums, strict=True)
    ]
    return [d_x_ND.view(hidden_BTD.shape), *whole]


@_in_chunks_backward.register_fake
def _(
    d_out_BTD: torch.Tensor, hidden_BTD: torch.Tensor, state: list[torch.Tensor], key: int, trained: list[bool]
) -> list[torch.Tensor]:
    gradients = [tensor.new_empty(tensor.shape) for tensor, on in zip(state, trained, strict=True) if on]
    return [hidden_BTD.new_empty(hidden_BTD.shape), *gradients]


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, list[torch.Tensor], int], output: torch.Tensor) -> None:
    hidden_BTD, state, ctx.key = inputs
    ctx.trained = [tensor.requires_grad for tensor in state]
    ctx.save_for_backward(hidden_BTD, *state)


def _backward(ctx: Any, d_out_BTD: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None], None]:
    hidden_BTD, *state = ctx.saved_tensors
    d_hidden_BTD, *found = _in_chunks_backward(d_out_BTD, hidden_BTD, state, ctx.key, ctx.trained)
    return d_hidden_BTD, [found.pop(0) if on else None for on in ctx.trained], None


_in_chunks.register_autograd(_backward, setup_context=_setup_context)


@contextlib.contextmanager
def _autograd_enabled() -> Iterator[None]:
    """Re-enable autograd's dispatch keys inside a custom operator.

    An operator's code runs below autograd: nothing would be recorded, and the changed dispatcher state would recompile code.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradNestedTensor,
    torch._C.DispatchKey.ADInplaceOrView,
)


# ------------------------------------------------------------------ which modules

ModuleKey = tuple[type[nn.Module], str, type[nn.Module]]
"""(class of the layer or base model, path inside it, class of the module at that path)."""


def find_token_wise(root: nn.Module, layers: Sequence[nn.Module], run: Callable[[], object]) -> dict[ModuleKey, str]:
    """Candidate modules, each with the reason why it cannot be computed in chunks ('' if it can).

    See [Note: which modules are token-wise]. `root` is the base model, with real (small) weights; `run` runs the model's forward
    on a few tokens.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    candidates: list[tuple[nn.Module, str, nn.Module]] = [
        (layer, name, m) for layer in layers for name, m in layer.named_modules()
        if name and sum(p.ndim >= 2 for p in m.parameters()) >= 2
    ]  # fmt: skip
    candidates += [
        (root, name, m) for name, m in root.named_modules()
        if name and id(m) not in inside and any(True for _ in m.parameters()) and not isinstance(m, nn.Embedding)
        and not any(id(part) in inside for part in m.modules())
    ]  # fmt: skip
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda m, args, kwargs, out: calls.setdefault(id(m), (args, kwargs, out)) and None, with_kwargs=True
        )
        for _, _, module in candidates
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[ModuleKey, str] = {}
    covered: set[int] = set()
    for owner, name, module in candidates:  # parents come before their submodules
        if id(module) in calls and id(module) not in covered:
            found[type(owner), name, type(module)] = objection = _objection(module, *calls[id(module)])
            if not objection:
                covered.update(id(part) for part in module.modules())
    return found


def _objection(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> str:
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 3:
        return "takes more than hidden states"
    x_BTD = args[0]
    if not isinstance(out, torch.Tensor) or out.shape != x_BTD.shape or out.dtype != x_BTD.dtype:
        return "returns more than hidden states"
    x_1ND = x_BTD.reshape(1, -1, x_BTD.shape[-1])
    with torch.no_grad():
        want = module(x_1ND)  # `out` may have been modified in place
        for cut in (1, x_1ND.shape[1] // 2):
            parts = torch.cat([module(x_1ND[:, :cut]), module(x_1ND[:, cut:])], dim=1)
            if not torch.allclose(parts, want, rtol=1e-3, atol=1e-4 * want.abs().max().item()):
                return "output of a token depends on other tokens"
    return ""


def modules_in_chunks(root: nn.Module, candidates: Mapping[ModuleKey, str], fp32_names: Collection[str]) -> list[str]:
    """Paths of the modules of a layer, or of the base model, that are computed in chunks; logs why others are not.

    `candidates` are from `find_token_wise` on a tiny copy. Modules of `fp32_names`, which HF keeps in fp32, may return another
    dtype.
    """
    found = []
    for (owner, path, kind), objection in candidates.items():
        if owner is not type(root) or path not in dict(root.named_modules()):
            continue
        module = root.get_submodule(path)
        if type(module) is not kind:
            continue
        if not objection and draws_random_numbers(module):
            objection = "draws random numbers"
        if not objection and any(name.startswith(path + ".") for name in fp32_names):
            objection = "has parameters of another dtype"
        if objection:
            logger.debug("%s.%s: not computed in chunks of tokens: %s", type(root).__name__, path, objection)
        else:
            found.append(path)
    return found


def mlp_matrices(layer: nn.Module, candidates: Mapping[ModuleKey, str]) -> frozenset[tuple[int, ...]]:
    """Sorted shapes of matrices that occur only in the layer's token-wise modules."""
    paths = [path + "." for (owner, path, _), why in candidates.items() if owner is type(layer) and not why]
    shapes = [(name, tuple(sorted(p.shape))) for name, p in layer.named_parameters() if p.ndim == 2]
    inside = {shape for name, shape in shapes if name.startswith(tuple(paths))}
    return frozenset(inside - {shape for name, shape in shapes if not name.startswith(tuple(paths))})


def draws_random_numbers(module: nn.Module) -> bool:
    """Whether a module has nonzero dropout or jitter: dropout submodules, or float attributes with such a name."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return True
        noisy = [v for n, v in vars(part).items() if ("drop" in n or "jitter" in n) and isinstance(v, float)]
        if any(value > 0 for value in noisy):
            return True
    return False
