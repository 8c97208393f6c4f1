from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kindred_vllm.scheduler import KindredScheduler, KindredSyncScheduler


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler without all that it needs to schedule."""

    def init(self: Any, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.running, self.waiting, self.block_size = [], [], 16
        self.kv_cache_manager = SimpleNamespace(usage=0.5, block_pool=SimpleNamespace(num_gpu_blocks=4))

    for kind in (Scheduler, AsyncScheduler):
        monkeypatch.setattr(kind, "__init__", init)
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: self.waiting.append(request))
    monkeypatch.setattr(Scheduler, "shutdown", lambda self: None)


def config(asynchronous: bool, **options: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        additional_config={"kindred": {"trace_endpoint": "tcp://127.0.0.1:0", **options}},
    )


def test_the_class_must_fit_the_engine() -> None:
    KindredScheduler(config(True)).shutdown()
    KindredSyncScheduler(config(False)).shutdown()
    with pytest.raises(ValueError, match="KindredSyncScheduler"):
        KindredScheduler(config(False))
    with pytest.raises(ValueError, match=r"asks for kindred_vllm\.scheduler\.KindredScheduler"):
        KindredSyncScheduler(config(True))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="accepted: a number from 1 to 60000"):
        KindredScheduler(config(True, trace_interval_ms=0))
    with pytest.raises(ValueError, match="accepted: tcp"):
        KindredScheduler(config(True, trace_endpoint="ipc://x"))


def test_a_request_that_comes_is_told() -> None:
    scheduler = KindredScheduler(config(True, trace_interval_ms=1))
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"kindred.trace")
    reader.connect(scheduler._traces.endpoint)
    came = 0
    while not reader.poll(20):  # it misses what was sent before it joined
        scheduler.add_request(SimpleNamespace(num_prompt_tokens=10, num_computed_tokens=0))
        came += 1
    trace = msgspec.msgpack.decode(reader.recv_multipart()[2])
    assert 1 <= trace["waiting"] <= came
    assert trace["waiting_prefill_tokens"] == 10 * trace["waiting"]
    assert (trace["kv_usage"], trace["kv_tokens"]) == (0.5, 64)
    reader.close()
    scheduler.shutdown()
