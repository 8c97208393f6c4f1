from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from vllm_fleet import DECODE, PLUGIN, Fleet, VllmServer, quiet_port, write_model

PREFILL_BLOCKS = 256
D1_REQUESTS = 2


def traces(port: int) -> list[str]:
    kindred = {"kindred": {"trace_endpoint": f"tcp://127.0.0.1:{port}", "trace_interval_ms": 1}}
    return [
        "--scheduler-cls",
        "kindred_vllm.scheduler.KindredSyncScheduler",
        "--additional-config",
        json.dumps(kindred),
    ]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill server with the plugin and two decode servers, of which d0 publishes traces and d1 has a limited
    queue. All tests share it. Never skipped: what is missing fails."""
    folder = pathlib.Path(tmp_path_factory.mktemp("vllm"))
    model = write_model(folder / "model")
    trace_ports = [quiet_port(), quiet_port()]
    events_port, replay_port = quiet_port(), quiet_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",  # vLLM binds where there is a star, and connects elsewhere
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    prefill_args = [
        "--kv-events-config",
        json.dumps(events),
        *traces(trace_ports[0]),
        "--scheduling-policy",
        "priority",
    ]
    prefill_args += ["--num-gpu-blocks-override", str(PREFILL_BLOCKS)]  # few, so that they are soon reused
    prefill_args += ["--worker-extension-cls", "hook.GateHook"]
    d0_args, d1_args = traces(trace_ports[1]), ["--max-num-queued-reqs", str(D1_REQUESTS)]
    started: list[VllmServer] = []
    try:
        # At once: loading is one thread's work, and all have the memory that they need from its start on.
        for name, connector, args in (
            ("prefill", PLUGIN, prefill_args),
            ("d0", DECODE, d0_args),
            ("d1", DECODE, d1_args),
        ):
            started.append(VllmServer(name, model, folder / f"{name}.log", connector, *args))
        for server in started:
            server.wait_ready()
        yield Fleet(
            prefill=started[0],
            decode=started[1:],
            events=f"{started[0].url}=tcp://127.0.0.1:{events_port},tcp://127.0.0.1:{replay_port}",
            traces=[f"tcp://127.0.0.1:{port}" for port in trace_ports],
            prefill_blocks=PREFILL_BLOCKS,
            folder=folder,
        )
    finally:
        for server in started:
            server.stop()
