"""vLLM's own scheduler, which also tells routers how it stands.

    --scheduler-cls kindred_vllm.scheduler.KindredScheduler
    --additional-config '{"kindred": {"trace_endpoint": "tcp://*:5570", "trace_interval_ms": 20}}'

Nothing is scheduled differently.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kindred_vllm import versions
from kindred_vllm.trace import EngineTrace, TracePublisher, endpoint_of, measure

versions.check(vllm.__version__)
logger = init_logger("vllm.kindred")

DEFAULT_ENDPOINT = "tcp://*:5570"
DEFAULT_INTERVAL_MS = 20


class _Traces:
    """Before vLLM's scheduler in the order of bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        if bool(config.scheduler_config.async_scheduling) != isinstance(self, AsyncScheduler):
            other = KindredSyncScheduler if isinstance(self, AsyncScheduler) else KindredScheduler
            raise ValueError(f"--scheduler-cls: this engine's scheduling asks for {__name__}.{other.__name__}")
        options = (config.additional_config or {}).get("kindred", {})
        rank = config.parallel_config.data_parallel_index
        endpoint = endpoint_of(options.get("trace_endpoint", DEFAULT_ENDPOINT), rank)
        interval_ms = options.get("trace_interval_ms", DEFAULT_INTERVAL_MS)
        if not isinstance(interval_ms, (int, float)) or not 1 <= interval_ms <= 60000:
            raise ValueError(f"kindred.trace_interval_ms {interval_ms!r}: accepted: a number from 1 to 60000")
        self._traces = TracePublisher(endpoint, rank, interval_ms / 1000)
        logger.info("kindred: traces of engine %d on %s", rank, self._traces.endpoint)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        self._traces.received(request)
        self._traces.publish(self._measure)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        # The engine steps no more once it has nothing to do, so its last word must not fall into the interval.
        idle = not self.running and not self.waiting  # type: ignore[attr-defined]
        self._traces.publish(self._measure, at_once=idle)
        return outputs

    def shutdown(self) -> None:
        self._traces.close()
        super().shutdown()  # type: ignore[misc]

    def _measure(self) -> EngineTrace:
        return measure(self)


class KindredScheduler(_Traces, AsyncScheduler):
    """Where vLLM schedules asynchronously, as it does unless told otherwise."""


class KindredSyncScheduler(_Traces, Scheduler):
    """Where it does not: on CPUs, and with --no-async-scheduling."""
