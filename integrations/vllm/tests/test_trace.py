from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kindred_vllm import trace as trace_module
from kindred_vllm.trace import MOST_RECEIVED, TOPIC, EngineTrace, TracePublisher, dispatch_of, endpoint_of, measure


def request(prompt: int, computed: int) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed)


def test_a_scheduler_is_measured() -> None:
    manager = SimpleNamespace(usage=0.25, block_pool=SimpleNamespace(num_gpu_blocks=10))
    scheduler = SimpleNamespace(
        running=[request(100, 60), request(10, 15)],  # the second one generates
        waiting=[request(30, 0)],
        kv_holding_waiting=[request(50, 50)],
        kv_cache_manager=manager,
        block_size=16,
    )
    trace = measure(scheduler)
    assert (trace.remaining_prefill_tokens, trace.waiting_prefill_tokens) == (40, 30)
    assert (trace.running, trace.waiting) == (2, 2)
    assert (trace.kv_usage, trace.kv_tokens) == (0.25, 160)


def test_traces_are_what_the_router_reads() -> None:
    fields = msgspec.msgpack.decode(EngineTrace(rank=1, received=[7]).encode())
    assert fields["v"] == 1
    assert set(fields) == {
        "v", "rank", "epoch", "sequence", "time_s", "remaining_prefill_tokens", "waiting_prefill_tokens", "running",
        "waiting", "kv_usage", "kv_tokens", "expert_pressure", "received",
    }  # fmt: skip


def test_at_most_one_trace_an_interval_but_the_last_word_at_once() -> None:
    now = [0.0]
    publisher = TracePublisher("tcp://127.0.0.1:*", 3, 1.0, clock=lambda: now[0])
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, TOPIC)
    reader.setsockopt(zmq.RCVTIMEO, 5000)
    reader.connect(publisher.endpoint)
    # A SUB socket misses what was sent before it joined: send until it has.
    while not reader.poll(20):
        now[0] += 1
        publisher.publish(EngineTrace)
    first = msgspec.msgpack.decode(reader.recv_multipart()[2])
    now[0] += 1
    publisher.publish(lambda: EngineTrace(running=1))
    publisher.publish(lambda: EngineTrace(running=2))  # within the interval
    publisher.publish(lambda: EngineTrace(running=3), at_once=True)
    seen = []
    while not seen or seen[-1]["running"] != 3:
        topic, number, body = reader.recv_multipart()
        seen.append(msgspec.msgpack.decode(body))
        assert topic == TOPIC
        assert struct.unpack(">Q", number)[0] == seen[-1]["sequence"]
    assert [trace["running"] for trace in seen if trace["running"]] == [1, 3]
    assert {trace["rank"] for trace in seen} == {3}
    assert {trace["epoch"] for trace in seen} == {first["epoch"]}
    reader.close()
    publisher.close()


def named(name: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"kindred_dispatch": name}))


def test_only_what_a_router_wrote_is_a_name() -> None:
    assert dispatch_of(named("00000000000000ff")) == 255
    assert dispatch_of(named("ffffffffffffffff")) == 2**64 - 1
    for other in ("ff", "x" * 16, 255, None, [1]):
        assert dispatch_of(named(other)) is None
    assert dispatch_of(SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None))) is None
    assert dispatch_of(SimpleNamespace(sampling_params=None)) is None  # a pooling request


def joined(publisher: TracePublisher) -> Any:
    """A reader that hears what is published from now on."""
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, TOPIC)
    reader.setsockopt(zmq.RCVTIMEO, 5000)
    reader.connect(publisher.endpoint)
    while not reader.poll(20):
        publisher.publish(EngineTrace, at_once=True)
    while reader.poll(20):
        reader.recv_multipart()
    return reader


def test_a_trace_names_the_last_requests_that_have_come() -> None:
    publisher = TracePublisher("tcp://127.0.0.1:*", 0, 1.0)
    reader = joined(publisher)
    for i in range(MOST_RECEIVED + 3):
        publisher.received(named(f"{i:016x}"))
    publisher.received(named("of somebody else"))
    publisher.publish(lambda: EngineTrace(running=1), at_once=True)
    received = msgspec.msgpack.decode(reader.recv_multipart()[2])["received"]
    assert received == list(range(3, MOST_RECEIVED + 3))
    reader.close()
    publisher.close()


def test_an_idle_engine_goes_on_to_say_so_and_one_that_hangs_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "IDLE_INTERVAL_S", 0.02)
    publisher = TracePublisher("tcp://127.0.0.1:*", 0, 1.0)
    reader = joined(publisher)
    publisher.publish(lambda: EngineTrace(kv_usage=0.25), at_once=True)
    seen = [msgspec.msgpack.decode(reader.recv_multipart()[2]) for _ in range(3)]
    assert [trace["sequence"] - seen[0]["sequence"] for trace in seen] == [0, 1, 2]
    assert seen[-1]["kv_usage"] == 0.25
    publisher.received(named("0000000000000007"))  # within the interval: no trace says so yet, nor that it is idle
    while reader.poll(0):
        reader.recv_multipart()
    assert not reader.poll(100)
    reader.close()
    publisher.close()


def test_each_rank_has_its_port() -> None:
    assert endpoint_of("tcp://*:5570", 2) == "tcp://*:5572"
    for wrong in ("ipc://x:1", "tcp://*", "5570"):
        with pytest.raises(ValueError, match="accepted: tcp"):
            endpoint_of(wrong, 0)
    with pytest.raises(ValueError, match="accepted: 0 to 63"):
        TracePublisher("tcp://127.0.0.1:*", 64, 1.0)
