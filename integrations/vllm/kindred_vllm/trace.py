"""An engine's latest state, pushed to routers: what Kindred's src/fleet/engine_trace.h reads.

A message of the ZMQ PUB socket has three parts: TOPIC, the message's number on that socket (8 bytes, big-endian), and
the trace in MessagePack.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import zmq

from kindred_vllm import versions

TOPIC = b"kindred.trace"
MOST_ENGINES = 64
DISPATCH_ARG = "kindred_dispatch"  # in a request's vllm_xargs: the router's name for it, 16 hex digits
MOST_RECEIVED = 256
IDLE_INTERVAL_S = 1.0  # an engine with nothing to do takes no steps, and must not be taken for dead


@dataclass
class EngineTrace:
    rank: int = 0
    epoch: int = 0
    sequence: int = 0
    time_s: float = 0.0
    remaining_prefill_tokens: int = 0  # of running requests, what is left to compute
    waiting_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    kv_tokens: int = 0  # that its KV has room for; 0: not said
    expert_pressure: float = 0.0
    received: list[int] = field(default_factory=list)  # of the last requests that a router has named, newest last

    def encode(self) -> bytes:
        return msgspec.msgpack.encode({"v": 1, **asdict(self)})


def measure(scheduler: Any) -> EngineTrace:
    """From vLLM's scheduler: its queues hold requests with num_prompt_tokens and num_computed_tokens."""
    waiting = versions.waiting(scheduler)
    manager = scheduler.kv_cache_manager
    return EngineTrace(
        remaining_prefill_tokens=sum(_left(request) for request in scheduler.running),
        # A waiting request has not looked for its prefix yet; one that was preempted, or waits for a transfer, has.
        waiting_prefill_tokens=sum(_left(request) for request in waiting),
        running=len(scheduler.running),
        waiting=len(waiting),
        kv_usage=min(1.0, max(0.0, float(manager.usage))),
        kv_tokens=int(manager.block_pool.num_gpu_blocks) * int(scheduler.block_size),
    )


def _left(request: Any) -> int:
    return max(0, request.num_prompt_tokens - request.num_computed_tokens)


def dispatch_of(request: Any) -> int | None:
    """What the router calls this request of vLLM's; None for requests of others."""
    args = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    name = args.get(DISPATCH_ARG)
    if not isinstance(name, str) or len(name) != 16:
        return None
    try:
        return int(name, 16)
    except ValueError:
        return None


class TracePublisher:
    """Sends at most one trace each `interval_s`, others only `at_once`; of an idle engine the last one again and again.

    Thread-safe. Never waits: a router that is slow loses old ones.
    """

    def __init__(
        self, endpoint: str, rank: int, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0 <= rank < MOST_ENGINES:
            raise ValueError(f"rank {rank}: accepted: 0 to {MOST_ENGINES - 1}")
        self._rank = rank
        self._epoch = secrets.randbits(63)
        self._interval_s = interval_s
        self._clock = clock
        self._due = -float("inf")
        self._sent = 0
        self._received: deque[int] = deque(maxlen=MOST_RECEIVED)
        self._last = EngineTrace()
        self._idle = True  # and the last trace says so
        self._lock = threading.Lock()  # over all of the above, and the socket
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 64)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closed = threading.Event()
        self._repeater = threading.Thread(target=self._repeat, name="kindred-traces", daemon=True)
        self._repeater.start()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def received(self, request: Any) -> None:
        """A request has come; the next trace names it."""
        name = dispatch_of(request)
        with self._lock:
            self._idle = False
            if name is not None:
                self._received.append(name)

    def publish(self, measure_now: Callable[[], EngineTrace], at_once: bool = False) -> None:
        with self._lock:
            now = self._clock()
            if now < self._due and not at_once:
                return
            self._due = now + self._interval_s
            self._last = measure_now()
            self._idle = self._last.running + self._last.waiting == 0
            self._send()

    def close(self) -> None:
        self._closed.set()
        self._repeater.join()
        self._socket.close()

    def _send(self) -> None:
        self._sent += 1
        trace = self._last
        trace.rank, trace.epoch, trace.sequence, trace.time_s = self._rank, self._epoch, self._sent, time.time()
        trace.received = list(self._received)
        self._socket.send_multipart([TOPIC, struct.pack(">Q", self._sent), trace.encode()], flags=zmq.NOBLOCK)

    def _repeat(self) -> None:
        # Only of an idle engine: one that hangs in a step must grow old.
        while not self._closed.wait(IDLE_INTERVAL_S):
            with self._lock:
                if self._idle:
                    self._send()


def endpoint_of(base: str, rank: int) -> str:
    """Each data-parallel rank publishes on a port of its own: tcp://*:5570 becomes tcp://*:5571 for rank 1."""
    head, separator, port = base.rpartition(":")
    if not separator or not port.isdigit() or not head.startswith("tcp://"):
        raise ValueError(f"trace_endpoint {base!r}: accepted: tcp://host:port")
    return f"{head}:{int(port) + rank}"
