"""Build a model on the meta device from a folder, a config or a model in memory: parameters have no storage, buffers are real.

[Note: buffers of a meta model]
Parameters live in the host store and are bound for each call, so the model itself needs none. Buffers are different: rotary
tables, causal masks and scales are computed in `__init__`, and the meta device discards their values. `from_pretrained` has the
same problem and relies on a rule that every family follows: `_init_weights` of the PreTrainedModel that owns a module restores
that module's buffers. We make the same call with all parameters flagged as initialised, which is the state `from_pretrained`
is in after loading. Values and dtypes therefore match `from_pretrained`: `inv_freq` stays fp32 under bf16 compute. Persistent
buffers (a router's correction bias) belong to the weights: they are zeros until loading or random initialisation fills them.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as hf_init
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.errors import UserError
from megatrain.models.folder import offline, refuse_unsafe_folder
from megatrain.models.rope import separate_lengths
from megatrain.models.structure import fp32_parameter_names, owner_of
from megatrain.paths import read_json, shown

IGNORE_IS_DECODER = frozenset({"gpt_neox", "gpt_neox_japanese"})
"""Decoder-only families whose configs say `is_decoder: false`, which their code never reads."""

_DECODERS_ONLY = "only decoder-only language models can be trained"
_CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError)


def find_model_folder(path: str | Path) -> Path:
    """The local folder for a path, or for a hub id that is in the local cache; UserError if neither exists."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UserError("is a file, not a model folder", str(path), "give the folder that contains config.json")
    cached = cached_snapshot(str(path))
    if cached is not None:
        return cached
    near = _near(folder.name, [p.name for p in folder.parent.iterdir() if p.is_dir()]) if folder.parent.is_dir() else []
    if near:
        remedy = f"did you mean {', '.join(str(folder.parent / name) for name in near)}?"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not folder.parent.is_dir():  # looks like a hub id
        remedy = f"nothing is downloaded: run `hf download {path}` first, or give a folder with config.json"
    else:
        remedy = "give a folder with config.json, or a cached hub id"
    raise UserError("no such model folder", str(path), remedy)


def known_positions(config: PreTrainedConfig) -> int | None:
    """Maximum row length that the config allows, in tokens; None: no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_model_config(path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the config of a causal language model; `path` is a folder, or a hub id in the local cache.

    Raises:
        UserError: No folder, no valid config.json, a model type unknown to the installed transformers, not a decoder, quantized.
    """
    folder = find_model_folder(path)
    raw = _read_config_json(folder)
    refuse_unsafe_folder(folder, trust_remote_code)
    where = str(folder / "config.json")
    remote = bool(raw.get("auto_map"))
    model_type = raw.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise UserError(f"model_type is {shown(model_type)}, not a name", where)
    if model_type not in CONFIG_MAPPING and not (remote and trust_remote_code):
        raise _unknown_type(model_type, remote, where)
    try:
        with offline():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        # huggingface_hub's validation errors derive from Exception alone, and their module moved between versions.
        from_hub = type(error).__module__.partition(".")[0] == "huggingface_hub"
        if not from_hub and not isinstance(error, _CONFIG_ERRORS):
            raise
        raise UserError(f"not a valid {model_type} config: {_first_line(error)}", where) from error
    _refuse_quantized(config, where)
    _refuse_encoder(config, where)
    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UserError(f"'{config.model_type}' has no causal language model in transformers", where, _DECODERS_ONLY)
    return config


def build_meta_model(
    config: PreTrainedConfig,
    *,
    compute_dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build a causal language model with parameters on meta and real buffers on the CPU; see [Note: buffers of a meta model].

    Args:
        config: Copied, not changed.
        compute_dtype: Dtype of the parameters, except those that transformers keeps in fp32.
        attn_implementation: `sdpa`, `eager`...; default: sdpa if the family supports it, else eager.

    Raises:
        UserError: transformers cannot build it: unsupported attention, a missing package, or invalid values in the config.
    """
    config = copy.deepcopy(config)
    _disable_cache(config)
    extra: dict[str, Any] = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        with offline(), torch.device("meta"), hf_init.meta_device_safe_creation_ops():
            model = AutoModelForCausalLM.from_config(
                config, dtype=compute_dtype, trust_remote_code=trust_remote_code, **extra
            )
    except (ValueError, ImportError) as error:  # an unsupported attention, or a missing package
        raise UserError(f"the model cannot be built: {_first_line(error)}", config.model_type) from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as error:  # an invalid value
        raise UserError(
            f"the model cannot be built from its config: {type(error).__name__}: {_first_line(error)}",
            f"model type {config.model_type}",
            "check the values in config.json",
        ) from error
    _settle_parameters(model, compute_dtype)
    _make_buffers(model, compute_dtype)
    separate_lengths(model)
    return model


def refuse_no_causal_lm(model: object) -> None:
    """Raise a UserError unless a model in memory is a transformers causal language model."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"expected a causal language model of transformers, found an object of type {kind}",
            remedy="give a model folder, or the model that AutoModelForCausalLM returns, without a wrapper",
        )
    where = f"the {kind} in memory"
    if model.get_output_embeddings() is None:
        raise UserError("has no language modelling head", where, "build it with AutoModelForCausalLM")
    _refuse_encoder(model.config, where)


NOT_ARCHITECTURE = frozenset(
    "_name_or_path transformers_version dtype torch_dtype use_cache architectures auto_map attn_implementation "
    "_attn_implementation _attn_implementation_internal bos_token_id eos_token_id pad_token_id id2label label2id".split()
)
"""Config keys that do not affect what the layers compute."""


def refuse_other_config(checkpoint: Path, config: PreTrainedConfig) -> None:
    """Raise UserError if a checkpoint's config has the same tensors but computes something else (activation, rotary base...).

    A folder without a readable config is left to the checkpoint's own checks.
    """
    file = checkpoint / "config.json"
    try:
        refuse_unsafe_folder(checkpoint)
    except (UserError, OSError):  # also: there is no such folder
        return
    if not file.is_file():
        return
    try:
        with offline():  # `get_config_dict` decodes infinities, which JSON stores as strings
            raw, _ = type(config).get_config_dict(str(checkpoint), local_files_only=True)
        if raw.get("model_type") != config.model_type:
            return  # the text model of a multimodal one, or another family, which the tensor names will show
        saved = type(config).from_dict(raw).to_dict()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError):
        return
    mine = config.to_dict()
    shared = (saved.keys() & mine.keys()) - NOT_ARCHITECTURE
    other = [k for k in sorted(shared) if _architecture(saved[k]) != _architecture(mine[k])]
    if other:
        what = ", ".join(f"{key} is {saved[key]!r} there and {mine[key]!r} here" for key in other[:4])
        raise UserError(
            f"the checkpoint's model computes something else: {what}",
            str(file),
            "resume with the config it was trained with, or start a new run from this folder's weights",
        )


def _architecture(value: Any) -> Any:
    """A config value without `NOT_ARCHITECTURE` keys, nested configs included; tuples become lists."""
    if isinstance(value, dict):
        return {k: _architecture(v) for k, v in value.items() if k not in NOT_ARCHITECTURE}
    if isinstance(value, list | tuple):
        return [_architecture(item) for item in value]
    return value


def build_from_memory(model: PreTrainedModel, *, compute_dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Copy a model with its parameters on meta, in `compute_dtype` or the model's own, and all buffers copied to the CPU."""
    # deepcopy looks in its memo first: parameters that are already there are never copied, and ties stay ties.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        # If the model has another dtype, its fp32 parameters were made fp32 by the family's code and stay fp32.
        follows = parameter.is_floating_point() and (parameter.dtype != torch.float32 or model.dtype == torch.float32)
        dtype = compute_dtype if compute_dtype and follows else parameter.dtype
        memo[id(parameter)] = _on_meta(parameter, dtype)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    twin = copy.deepcopy(model, memo)
    _disable_cache(twin.config)
    if compute_dtype:
        twin.config.dtype = compute_dtype
        _settle_parameters(twin, compute_dtype)
    separate_lengths(twin)
    return twin


def restore_buffers(model: PreTrainedModel, names: Collection[str]) -> None:
    """Set the buffers `names` to the family's initial values, and change nothing else.

    Raises UserError if the family's `_init_weights` does not set one of them.
    """
    wanted = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in names}
    ids = {id(buffer) for buffer in wanted.values()}
    mark_unfilled(wanted.values())
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in ids]
    for tensor in others:  # transformers leaves flagged tensors alone
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        model.initialize_weights()
    finally:
        for holder in (*others, *model.modules()):
            if getattr(holder, "_is_hf_initialized", None) is not None:
                del holder._is_hf_initialized  # type: ignore[union-attr]
    refuse_unfilled(model, wanted)


def mark_unfilled(tensors: Iterable[torch.Tensor]) -> None:
    """Fill floating-point tensors with NaN, so that `refuse_unfilled` can tell which ones an initialisation left out."""
    for tensor in tensors:
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 0)


def refuse_unfilled(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a UserError if a tensor still contains the NaNs of `mark_unfilled`."""
    unfilled = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.isnan().any()]
    if unfilled:
        raise UserError(
            f"transformers' `_init_weights` of {type(model).__name__} does not set {', '.join(unfilled[:3])}",
            remedy="start from a folder with weights, or from a model in memory",
        )


def _settle_parameters(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Put every parameter on meta (some families draw values in `__init__`) in the dtype it computes in."""
    settled: dict[int, nn.Parameter] = {}
    keep_fp32 = fp32_parameter_names(model, compute_dtype)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        dtype = torch.float32 if name in keep_fp32 else parameter.dtype
        owner, leaf = owner_of(model, name)
        owner._parameters[leaf] = settled.setdefault(id(parameter), _on_meta(parameter, dtype))


def _on_meta(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"), parameter.requires_grad)


def _disable_cache(config: PreTrainedConfig) -> None:
    """Switch off the key-value cache, which layers would fill during training."""
    config.use_cache = config.get_text_config().use_cache = False


def _make_buffers(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Allocate every buffer and set its value; see [Note: buffers of a meta model]."""
    persistent = set(model.state_dict())
    keep_fp32 = fp32_parameter_names(model, compute_dtype)
    made: dict[int, torch.Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        owner, leaf = owner_of(model, name)
        if id(buffer) not in made:
            dtype = torch.float32 if name in keep_fp32 and buffer.is_floating_point() else buffer.dtype
            made[id(buffer)] = torch.zeros(buffer.shape, dtype=dtype, device="cpu")
        owner._buffers[leaf] = made[id(buffer)]
    restore_buffers(model, dict(model.named_buffers(remove_duplicate=False)).keys() - persistent)


def cached_snapshot(hub_id: str) -> Path | None:
    """Folder of a hub id in the local cache; None if it is not there."""
    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:  # a path that cannot be a hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read_config_json(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not os.path.lexists(file):
        inside = [p.parent.name for p in folder.glob("*/config.json")]
        near = _near("config.json", [p.name for p in folder.iterdir()])
        if inside:
            remedy = f"did you mean {folder / inside[0]}?"
        elif near:
            remedy = f"did you mean {', '.join(near)}? The file must be named config.json"
        else:
            remedy = "give a Hugging Face model folder"
        raise UserError("has no config.json", str(folder), remedy)
    raw = read_json(folder, file.name, constants=True)
    if not isinstance(raw, dict):
        raise UserError("not a JSON object", str(file))
    return raw


def _unknown_type(model_type: object, remote: bool, where: str) -> UserError:
    near = _near(str(model_type), list(CONFIG_MAPPING.keys())) if model_type else []
    if remote:
        remedy = "the folder contains its own code: read it, and if you trust it set model.trust_remote_code: true"
    else:
        remedy = (
            f"did you mean {', '.join(near)}?" if near else "install a version of transformers that has this family"
        )
    if model_type is None:
        return UserError("has no model_type", where, remedy)
    return UserError(f"model type '{model_type}' is unknown to transformers {transformers.__version__}", where, remedy)


def _refuse_quantized(config: PreTrainedConfig, where: str) -> None:
    for part in (config, config.get_text_config()):
        quantization = getattr(part, "quantization_config", None)
        if quantization:
            as_dict = quantization if isinstance(quantization, dict) else quantization.to_dict()
            method = as_dict.get("quant_method", "unknown")
            raise UserError(
                f"the checkpoint is quantized ({method}); training needs full weights",
                where,
                "use the bf16 or fp32 release of this model, or dequantize it and save it again",
            )


def _refuse_encoder(config: PreTrainedConfig, where: str) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"'{kind}' is an encoder-decoder model", where, _DECODERS_ONLY)
    if getattr(config, "is_decoder", None) is False and kind not in IGNORE_IS_DECODER:
        raise UserError(f"'{kind}' is an encoder (is_decoder is false)", where, _DECODERS_ONLY)


def _near(name: str, candidates: list[str]) -> list[str]:
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    return close or sorted(other for other in candidates if name and other.lower().startswith(name.lower()))[:3]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:2]) or type(error).__name__


def dropout_keys(config: Any) -> list[str]:
    """Config keys of dropout and jitter that are above 0."""
    suffixes = ("pdrop", "router_jitter_noise", "input_jitter_noise")
    names = sorted(name for name in vars(config) if "dropout" in name or name.endswith(suffixes))
    return [name for name in names if isinstance(value := getattr(config, name), float) and value > 0.0]
