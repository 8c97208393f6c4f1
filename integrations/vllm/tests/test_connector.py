from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SlidingWindowSpec, kv_config
from test_orders import step

from kindred_vllm import connector, versions
from kindred_vllm.connector import CountsOfStep, SchedulerCounts, WorkerCounts, attention_group, unsupported
from kindred_vllm.orders import Orders
from kindred_vllm.wire import ExpertCounts

EXPERTS, TOP_K = 4, 2


def counts(tokens: int = 2) -> ExpertCounts:
    return ExpertCounts([0], TOP_K, tokens, np.array([[tokens, tokens, 0, 0]], dtype=np.int32))


def request(name: str, tokens: int = 4, remote_decode: bool = True) -> Any:
    params = {"do_remote_decode": True} if remote_decode else None
    return SimpleNamespace(request_id=name, num_prompt_tokens=tokens, kv_transfer_params=params)


# --- the scheduler's half ------------------------------------------------------------------------


def test_counts_of_the_last_chunk_reach_the_answer_that_was_asked_for_before_them(cache: Any) -> None:
    half = SchedulerCounts(cache)
    half.new_request(request("a"))
    assert half.orders(step(new={"a": ([5], 0, 4)})).count == {"a": ([5], 4)}
    answer: dict[str, Any] = {"do_remote_prefill": True}
    half.finished("a", answer)  # vLLM asks first …
    half.counted(CountsOfStep({"a": counts()}))  # … and shows the worker's counts afterwards
    assert answer["expert_counts"]["tokens"] == 2


def test_counts_of_an_earlier_step_wait_for_the_end(cache: Any) -> None:
    half = SchedulerCounts(cache)
    half.new_request(request("a"))
    half.counted(CountsOfStep({"a": counts()}))
    answer: dict[str, Any] = {}
    half.finished("a", answer)
    assert answer["expert_counts"]["tokens"] == 2


def test_nothing_is_kept_of_requests_that_ended(cache: Any) -> None:
    half = SchedulerCounts(cache)
    half.new_request(request("a"))
    half.finished("a", None)  # aborted
    half.counted(CountsOfStep({"a": counts()}))
    late: dict[str, Any] = {}
    half.new_request(request("b"))
    half.finished("b", late)
    half.orders(step())  # the answer has left
    half.counted(CountsOfStep({"b": counts()}))
    assert late == {}
    assert not half._ready
    assert not half._answers


def test_only_prefill_legs_are_followed(cache: Any) -> None:
    half = SchedulerCounts(cache)
    half.new_request(request("a", remote_decode=False))
    assert half.orders(step(new={"a": ([5], 0, 4)})).count == {}


def test_blocks_of_a_transfer_are_forgotten(cache: Any) -> None:
    half = SchedulerCounts(cache)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1], [2, 3]))
    half.allocated(request("a"), blocks, external_tokens=0)
    assert half.orders(step()).forget == []
    half.allocated(request("a"), blocks, external_tokens=8)
    assert half.orders(step()).forget == [2, 3]


def test_workers_answers_travel_and_add_up() -> None:
    other = ExpertCounts([3], TOP_K, 2, np.array([[0, 0, 2, 2]], dtype=np.int32))
    first, second = CountsOfStep({"a": counts(), "b": counts()}), CountsOfStep({"a": other})
    whole = pickle.loads(pickle.dumps(first)).aggregate(second)
    assert whole.counts["a"].layers == [0, 3]
    assert whole.counts["b"].layers == [0]


# --- the worker's half ---------------------------------------------------------------------------


class Layer:
    """What vLLM's MoE layer has to do with it."""

    def __init__(self, index: int) -> None:
        self.layer_id = index
        self.router = SimpleNamespace(top_k=TOP_K, set_capture_fn=self._set)
        self.quant_method = SimpleNamespace(is_monolithic=False)
        self.capture: Any = None

    def _set(self, fn: partial[None]) -> None:
        self.capture = fn


def worker(cache: Any, layers: list[Layer]) -> WorkerCounts:
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 3, get_num_experts=lambda: EXPERTS)
    config: Any = SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        compilation_config=SimpleNamespace(
            static_forward_context={str(layer.layer_id): layer for layer in layers},
            static_all_moe_layers=[str(layer.layer_id) for layer in reversed(layers)],
            max_cudagraph_capture_size=None,
        ),
    )
    return WorkerCounts(config, cache, torch.device("cpu"))


def see(half: WorkerCounts, slots: list[int]) -> None:
    half.see_slots({"attn_metadata": {"attention1": SimpleNamespace(slot_mapping=torch.tensor(slots))}})


def test_a_step_from_router_to_counts(cache: Any) -> None:
    layers = [Layer(0), Layer(2), Layer(3)]  # the last one is a draft model's
    half = worker(cache, layers)
    assert layers[2].capture is None
    see(half, [20, 21, 22])
    for layer, ids in zip(layers[:2], ([[0, 1], [1, 2], [2, 3]], [[3, 0], [3, 1], [3, 2]]), strict=True):
        layer.capture(torch.tensor(ids))
    step_counts = half.end_step(Orders(count={"a": ([5], 3)}, prompt_tokens=3))
    assert step_counts is not None
    assert step_counts.counts["a"].layers == [0, 2]
    assert step_counts.counts["a"].data.tolist() == [[1, 2, 2, 1], [1, 1, 1, 3]]


def test_a_model_whose_kernels_hide_their_choice_is_told_at_the_start(cache: Any) -> None:
    hidden = Layer(0)
    hidden.quant_method.is_monolithic = True
    with pytest.raises(versions.NotCapturable):
        worker(cache, [hidden])
    with pytest.raises(versions.NotCapturable, match="no MoE layers"):
        worker(cache, [])


def test_ids_that_are_all_zero_end_it(cache: Any) -> None:
    layer = Layer(0)
    half = worker(cache, [layer])
    for _ in range(2):
        see(half, [0, 1])
        layer.capture(torch.zeros((2, TOP_K), dtype=torch.int64))
        assert half.end_step(Orders(count={"a": ([0], 2)}, prompt_tokens=2)) is None
    see(half, [0, 1])
    layer.capture(torch.tensor([[0, 1], [1, 2]]))
    assert half.end_step(Orders(count={"a": ([0], 2)}, prompt_tokens=2)) is None  # it stays off


def test_a_prompt_whose_slots_cannot_be_seen_ends_it_but_a_decode_step_does_not(cache: Any) -> None:
    layer = Layer(0)
    half = worker(cache, [layer])
    assert half.end_step(Orders()) is None
    see(half, [0])
    layer.capture(torch.tensor([[0, 1]]))
    assert half.end_step(Orders(count={"a": ([0], 1)}, prompt_tokens=1)) is not None
    assert half.end_step(Orders(count={"b": ([0], 1)}, prompt_tokens=1)) is None
    assert half._off


# --- configurations without counts ---------------------------------------------------------------


def config(**parallel: Any) -> Any:
    of_rank = {"data_parallel_size": 1, "enable_expert_parallel": False, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**of_rank),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
    )


def test_configurations_without_counts_say_why(cache: Any) -> None:
    assert unsupported(config(), cache) is None
    assert "data parallel" in str(unsupported(config(data_parallel_size=2, enable_expert_parallel=True), cache))
    assert "decode_context" in str(unsupported(config(decode_context_parallel_size=2), cache))
    assert "every token" in str(unsupported(config(), kv_config(SlidingWindowSpec)))
    both = config()
    both.aux_output_config.enable_return_routed_experts = True
    assert "listener" in str(unsupported(both, cache))


def test_the_group_that_keeps_every_token(cache: Any) -> None:
    assert attention_group(cache) == 1
    assert attention_group(kv_config(SlidingWindowSpec)) is None


def test_it_is_a_connector_that_vllm_takes() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

    named: Any = SimpleNamespace(kv_connector="KindredNixlConnector", kv_connector_module_path="kindred_vllm.connector")
    found = KVConnectorFactory.get_connector_class(named)
    assert found is connector.KindredNixlConnector
    assert issubclass(found, NixlConnector)
    assert KVConnectorFactory.supports_hma_config(named)
