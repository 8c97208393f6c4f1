"""The one place that knows how vLLM versions differ, and which of them this plugin was written for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OLDEST = (0, 27)
NEWEST = (0, 33)
ANY_VERSION = "KINDRED_VLLM_ANY_VERSION"
EPLB_ALLREDUCE = "_allreduce_list"

Capture = Callable[["torch.Tensor"], None]


class UnsupportedVersion(RuntimeError):
    """vLLM is of a version that this plugin was not written for."""


class NotCapturable(RuntimeError):
    """The router's choices of a layer are not to be seen from outside its kernel."""


def parse(version: str) -> tuple[int, int]:
    """Major and minor of '0.32.0', '0.32.1.dev3+gabc' and the like."""
    parts = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise UnsupportedVersion(f"kindred-vllm cannot read vLLM's version {version!r}") from None


def check(version: str) -> None:
    """Raises UnsupportedVersion, unless the version is known or KINDRED_VLLM_ANY_VERSION=1 is set."""
    if os.environ.get(ANY_VERSION) == "1":
        return
    if not OLDEST <= parse(version) <= NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise UnsupportedVersion(
            f"kindred-vllm knows vLLM {oldest} to {newest}, this is {version}; set {ANY_VERSION}=1 to try all the same"
        )


def waiting(scheduler: Any) -> list[Any]:
    """Requests that wait, in whichever of the scheduler's queues; some versions have more than one."""
    out = [*scheduler.waiting]
    for name in ("skipped_waiting", "kv_holding_waiting"):
        out += getattr(scheduler, name, None) or []
    return out


def eplb_allreduce(state: Any) -> Callable[..., Any]:
    """EplbState's method that adds up the ranks' counts, which the EPLB part reads beforehand."""
    found = getattr(state, EPLB_ALLREDUCE, None)
    if found is None:
        raise UnsupportedVersion(f"this vLLM's EplbState has no {EPLB_ALLREDUCE}: start without KINDRED_VLLM_EPLB=1")
    return found


def moe_layers(vllm_config: Any) -> list[Any]:
    """The target model's MoE layers on this worker, by model layer index, a draft model's left out."""
    compilation = vllm_config.compilation_config
    hidden_layers = vllm_config.model_config.get_total_num_hidden_layers()
    layers = [compilation.static_forward_context[name] for name in compilation.static_all_moe_layers]
    return sorted((layer for layer in layers if layer.layer_id < hidden_layers), key=lambda layer: layer.layer_id)


def set_capture(layer: Any, capture: Capture) -> None:
    """Has `capture` called with the logical ids [tokens, top_k] of each forward pass of a MoE layer.

    Raises NotCapturable where a monolithic kernel routes by itself and does not give the ids away.
    """
    method = _quant_method(layer)
    if not method.is_monolithic:
        if not hasattr(layer.router, "set_capture_fn"):
            raise NotCapturable(f"router {type(layer.router).__name__} has no capture function")
        layer.router.set_capture_fn(capture)
        return
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(getattr(kernel, "impl", None), "fused_experts", None)
    if not (hasattr(experts, "supports_routing_replay_capture") and experts.supports_routing_replay_capture()):
        raise NotCapturable(f"monolithic kernel {type(experts).__name__} routes by itself and does not say how")
    if hasattr(experts, "set_capture_fn"):  # up to 0.31
        experts.set_capture_fn(capture)
        return
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsSink  # from 0.32

    layer.routed_experts.routing_sink = RoutedExpertsSink(experts.moe_config, capture)


def _quant_method(layer: Any) -> Any:
    method = getattr(layer, "_quant_method", None)
    return method if method is not None else layer.quant_method


def returns_routed_experts(vllm_config: Any) -> bool:
    """Whether vLLM itself captures ids (--enable-return-routed-experts): a router has room for one capture function."""
    aux = getattr(vllm_config, "aux_output_config", None)  # from 0.31
    holder = aux if aux is not None else vllm_config.model_config
    return bool(getattr(holder, "enable_return_routed_experts", False))


def slot_mapping(load_kwargs: dict[str, Any], layer_names: list[str]) -> torch.Tensor | None:
    """The KV slots of this step's tokens, by the first of `layer_names` that has some; None where they are not said.

    Where a step is replayed as one full CUDA graph there is no forward context; from 0.31 start_load_kv() is given the
    attention metadata instead.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    context = get_forward_context() if is_forward_context_available() else None
    by_layer = getattr(context, "slot_mapping", None)
    metadata = load_kwargs.get("attn_metadata")
    for name in layer_names:
        if isinstance(by_layer, dict) and by_layer.get(name) is not None:
            return by_layer[name]
        if isinstance(metadata, dict) and getattr(metadata.get(name), "slot_mapping", None) is not None:
            return metadata[name].slot_mapping
    return None
