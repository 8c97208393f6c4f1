from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
from vllm_fleet import DECODE, PLUGIN, Fleet, VllmServer, quiet_port, write_model

PREFILL_BLOCKS = 400


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill server with the plugin and two stock decode servers. Never skipped: what is missing fails."""
    folder = pathlib.Path(tmp_path_factory.mktemp("vllm"))
    model = write_model(folder / "model")
    trace_port, events_port, replay_port = quiet_port(), quiet_port(), quiet_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",  # vLLM binds where there is a star, and connects elsewhere
        "replay_endpoint": f"tcp://*:{replay_port}",
    }
    kindred = {"kindred": {"trace_endpoint": f"tcp://127.0.0.1:{trace_port}", "trace_interval_ms": 1}}
    prefill_args = ["--kv-events-config", json.dumps(events), "--additional-config", json.dumps(kindred)]
    prefill_args += ["--scheduler-cls", "kindred_vllm.scheduler.KindredSyncScheduler"]
    prefill_args += ["--num-gpu-blocks-override", str(PREFILL_BLOCKS)]  # few, so that they are soon reused
    prefill_args += ["--worker-extension-cls", "hook.GateHook"]
    started: list[VllmServer] = []
    try:
        # At once: loading is one thread's work, and all have the memory that they need from its start on.
        for name, connector, args in (("prefill", PLUGIN, prefill_args), ("d0", DECODE, []), ("d1", DECODE, [])):
            started.append(VllmServer(name, model, folder / f"{name}.log", connector, *args))
        for server in started:
            server.wait_ready()
        yield Fleet(
            prefill=started[0],
            decode=started[1:],
            events=f"{started[0].url}=tcp://127.0.0.1:{events_port},tcp://127.0.0.1:{replay_port}",
            traces=f"tcp://127.0.0.1:{trace_port}",
            prefill_blocks=PREFILL_BLOCKS,
            folder=folder,
        )
    finally:
        for server in started:
            server.stop()
