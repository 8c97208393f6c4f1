"""NIXL's KV connector, and the expert counts of the prompt in what it hands to the router.

    --kv-transfer-config '{"kv_connector":"KindredNixlConnector","kv_connector_module_path":"kindred_vllm.connector",
                           "kv_role":"kv_producer"}'

On a prefill server only; decode servers keep NixlConnector. `kv_transfer_params` of a finished prefill leg then has
`expert_counts`, which Kindred's router takes out again. Where counts cannot be had the server says why, once, and works
as with NixlConnector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.logger import init_logger

from kindred_vllm import versions
from kindred_vllm.orders import Orders, PromptBook
from kindred_vllm.slot_table import SlotTable
from kindred_vllm.wire import ExpertCounts, merge

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

versions.check(vllm.__version__)
logger = init_logger("vllm.kindred")


@dataclass
class CountsOfStep(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: counts of the prompts that a step completed."""

    counts: dict[str, ExpertCounts] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Stages of a pipeline have different layers; ranks of a tensor-parallel group other than 0 say nothing."""
        assert isinstance(other, CountsOfStep)
        both = dict(self.counts)
        for request_id, counts in other.counts.items():
            mine = both.get(request_id)
            both[request_id] = counts if mine is None else merge([mine, counts])
        return CountsOfStep(both)


def attention_group(kv_cache_config: KVCacheConfig) -> int | None:
    """The KV cache group that keeps a block for every token of a prompt."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        name = type(group.kv_cache_spec).__name__
        if name in ("FullAttentionSpec", "MLAAttentionSpec"):
            return index
    return None


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why counts cannot be had with this configuration, whatever the model's kernels do."""
    parallel = vllm_config.parallel_config
    if versions.returns_routed_experts(vllm_config):
        return "--enable-return-routed-experts is on, and a router reports to one listener only"
    if parallel.data_parallel_size > 1 and parallel.enable_expert_parallel:
        return "data parallel ranks see each other's tokens; tried and exact without data parallelism only"
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is above 1: a rank holds part of a prompt's tokens"
    if attention_group(kv_cache_config) is None:
        return "no KV cache group keeps every token of a prompt"
    return None


class WorkerCounts:
    """The worker's half: captures ids while the model runs, counts when the scheduler says so."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, device: torch.device) -> None:
        layers = versions.moe_layers(vllm_config)
        if not layers:
            raise versions.NotCapturable("the model has no MoE layers on this worker")
        group_index = attention_group(kv_cache_config)
        assert group_index is not None
        group = kv_cache_config.kv_cache_groups[group_index]
        self._attention_layers = list(group.layer_names)
        model = vllm_config.model_config
        graphs = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        self._table = SlotTable(
            layers=[layer.layer_id for layer in layers],
            experts=model.get_num_experts(),
            top_k=layers[0].router.top_k,
            blocks=kv_cache_config.num_blocks,
            block_size=group.kv_cache_spec.block_size,
            step_tokens=max(vllm_config.scheduler_config.max_num_batched_tokens, graphs),
            device=device,
        )
        for row, layer in enumerate(layers):
            versions.set_capture(layer, partial(self._table.capture, row))
        logger.info(
            "kindred: expert counts of %d MoE layers, %d experts, top %d; %.1f MiB on %s",
            len(layers),
            model.get_num_experts(),
            layers[0].router.top_k,
            self._table.bytes / 2**20,
            device,
        )
        self._slots: torch.Tensor | None = None
        self._off = False

    def see_slots(self, load_kwargs: dict[str, Any] | None = None) -> None:
        found = versions.slot_mapping(load_kwargs or {}, self._attention_layers)
        if found is not None:
            self._slots = found

    def end_step(self, orders: Orders) -> CountsOfStep | None:
        slots, self._slots = self._slots, None
        if self._off:
            return None
        if slots is not None:
            self._table.commit(slots)
        elif orders.prompt_tokens > 0:
            self._stop("the KV slots of a prompt's tokens are not to be seen (prefill as one full CUDA graph?)")
            return None
        # After the step's own rows: what comes from elsewhere was not computed in it.
        self._table.forget(orders.forget)
        counts: dict[str, ExpertCounts] = {}
        for request_id, (blocks, tokens) in orders.count.items():
            found = self._table.count(blocks, tokens)
            if found is None:
                logger.warning_once("kindred: a prompt with tokens of unknown experts (their KV came from elsewhere?)")
                continue
            if (problem := found.problem()) is not None:
                self._stop(f"{problem}: does a kernel choose experts by itself?")
                return None
            counts[request_id] = found
        return CountsOfStep(counts) if counts else None

    def _stop(self, why: str) -> None:
        # Wrong counts would send requests to the wrong workers, so rather none from here on.
        self._off = True
        logger.error("kindred: no expert counts any more: %s", why)


class SchedulerCounts:
    """The scheduler's half.

    A prompt's last chunk, its counts and the end of its request come in one and the same step: vLLM asks for
    `kv_transfer_params` first and shows the worker's counts afterwards, but sends the answer after both. So the
    parameters are completed in place.
    """

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        group = attention_group(kv_cache_config)
        assert group is not None
        self._group = group
        self._book = PromptBook(group, kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size)
        self._ready: dict[str, ExpertCounts] = {}
        self._answers: dict[str, dict[str, Any]] = {}

    def new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is not None and params.get("do_remote_decode"):
            self._book.follow(request.request_id, request.num_prompt_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if external_tokens > 0:
            self._book.loaded(list(blocks.get_block_ids()[self._group]))

    def orders(self, scheduler_output: SchedulerOutput) -> Orders:
        self._answers.clear()  # they have left
        return self._book.orders(scheduler_output)

    def finished(self, request_id: str, params: dict[str, Any] | None) -> None:
        self._book.drop(request_id)
        counts = self._ready.pop(request_id, None)
        if params is None:
            return
        if counts is not None:
            params["expert_counts"] = counts.to_json()
        else:
            self._answers[request_id] = params

    def counted(self, step: CountsOfStep) -> None:
        for request_id, counts in step.counts.items():
            params = self._answers.pop(request_id, None)
            if params is not None:
                params["expert_counts"] = counts.to_json()
            elif request_id in self._book:
                self._ready[request_id] = counts


class KindredNixlConnector(NixlConnector):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker_counts: WorkerCounts | None = None
        self._scheduler_counts: SchedulerCounts | None = None
        self._kv_config = kv_cache_config
        self._why_not = unsupported(vllm_config, kv_cache_config)
        if self._why_not is not None:
            logger.error("kindred: no expert counts: %s", self._why_not)
        elif role == KVConnectorRole.SCHEDULER:
            self._scheduler_counts = SchedulerCounts(kv_cache_config)

    # --- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._why_not is not None or not _first_of_tensor_parallel():
            return
        device = next(iter(kv_caches.values())).device
        try:
            self._worker_counts = WorkerCounts(self._vllm_config, self._kv_config, device)
        except versions.NotCapturable as error:
            logger.error("kindred: no expert counts: %s", error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker_counts is not None:
            self._worker_counts.see_slots()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker_counts is not None:
            self._worker_counts.see_slots(kwargs)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        orders = getattr(self._connector_metadata, "kindred", None)
        if self._worker_counts is None or orders is None:
            return super().build_connector_worker_meta()
        return self._worker_counts.end_step(orders)

    # --- scheduler -------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._scheduler_counts is not None:
            self._scheduler_counts.new_request(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._scheduler_counts is not None:
            self._scheduler_counts.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        if self._scheduler_counts is not None:
            meta.kindred = self._scheduler_counts.orders(scheduler_output)
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        step = connector_output.kv_connector_worker_meta
        if self._scheduler_counts is not None and isinstance(step, CountsOfStep):
            self._scheduler_counts.counted(step)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        delay, params = super().request_finished(request, block_ids)
        return delay, self._with_counts(request, params)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delay, params = super().request_finished_all_groups(request, block_ids)
        return delay, self._with_counts(request, params)

    def _with_counts(self, request: Request, params: dict[str, Any] | None) -> dict[str, Any] | None:
        if self._scheduler_counts is not None:
            self._scheduler_counts.finished(request.request_id, params)
        return params


def _first_of_tensor_parallel() -> bool:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0
