"""Starts real vLLM servers for the end-to-end test, and stops them whatever happens."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from cluster import MODEL, Server, get_json, metric, post_json, request, wait_until  # noqa: E402

PYTHON = sys.executable
NAME = "tiny"
BLOCK = 32
START_TIMEOUT_S = 600
PLUGIN = {
    "kv_connector": "KindredNixlConnector",
    "kv_connector_module_path": "kindred_vllm.connector",
    "kv_role": "kv_producer",
}
PRODUCER = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}  # the same without the plugin
DECODE = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}

_given: set[int] = set()


def quiet_port() -> int:
    """A free port that no client is given meanwhile: servers listen on theirs minutes after they are told which."""
    for _ in range(100):
        port = random.randrange(20000, 32000)  # below what Linux gives to clients
        if port in _given:
            continue
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise AssertionError("no free port between 20000 and 32000")


def write_model(folder: pathlib.Path) -> pathlib.Path:
    subprocess.run([PYTHON, HERE / "hf_model.py", MODEL, folder], check=True)
    return folder


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` and the processes it starts, as one group."""

    def __init__(
        self, name: str, model: pathlib.Path, log: pathlib.Path, connector: dict[str, Any], *args: str
    ) -> None:
        self.name, self.log, self.port = name, log, quiet_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._out = log.open("wb")
        env = {
            **os.environ,
            "UCX_TLS": "tcp,self,sm",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(quiet_port()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # The model runs in the engine's process, not in a third one: importing torch and vLLM is most of a start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers share the cores
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc and /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HERE),
        }
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME]
        command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "4096"]
        command += ["--distributed-executor-backend", "uni"]
        command += ["--max-num-batched-tokens", "256", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--kv-transfer-config", json.dumps(connector), *args]
        self.popen = subprocess.Popen(
            ["nice", *map(str, command)], stdout=self._out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        self.started_s = time.monotonic()

    def wait_ready(self) -> VllmServer:
        def ready() -> bool:
            if self.popen.poll() is not None:
                raise AssertionError(f"{self.name} exited with {self.popen.returncode}:\n{self.tail()}")
            with contextlib.suppress(OSError):
                return request(self.url + "/health", timeout=5)[0] == 200
            return False

        wait_until(ready, START_TIMEOUT_S, f"{self.name} ready")
        version = json.loads(request(self.url + "/version")[2])["version"]
        took_s = time.monotonic() - self.started_s
        print(
            f"{self.name}: vLLM {version}, process {self.popen.pid}, {self.url}, ready after {took_s:.0f} s, "
            f"{self.processor_s():.0f} s of processor time",
            flush=True,
        )
        return self

    def rpc(self, method: str) -> Any:
        status, answer = post_json(self.url + "/collective_rpc", {"method": method})
        assert status == 200, answer
        return answer["results"][0]

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.url, name, **labels)

    def processor_s(self) -> float:
        """So far, of all its processes."""
        ticks = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == self.popen.pid else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def stop(self) -> None:
        if self.popen.poll() is None:
            print(f"{self.name}: {self.processor_s():.0f} s of processor time in all", flush=True)
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(20)
        self.kill()  # what the server left behind
        self._out.close()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@dataclasses.dataclass
class Fleet:
    prefill: VllmServer
    decode: list[VllmServer]
    events: str  # for --kv-events
    traces: list[str]  # endpoints of the prefill server and of d0
    prefill_blocks: int  # of the prefill server's KV cache
    folder: pathlib.Path

    @contextlib.contextmanager
    def router(self, *args: Any) -> Iterator[Server]:
        """`kindred router` over the fleet, once it has all of its servers."""
        urls = ["--prefill", self.prefill.url]
        for server in self.decode:
            urls += ["--decode", server.url]
        with self.router_over(urls, *args) as router:
            yield router

    @contextlib.contextmanager
    def router_over(self, urls: list[str], *args: Any) -> Iterator[Server]:
        router = Server(
            "router", *urls, "--health-interval-ms", 200, *args, log=self.folder / f"router-{quiet_port()}.log"
        )
        try:
            router.wait_ready("/ready")
            print(f"kindred router, process {router.popen.pid}, {router.url}", flush=True)
            yield router
        except BaseException:
            print(router.text()[-3000:])
            raise
        finally:
            router.stop()

    def counts_by_hook(self, prompt: str) -> tuple[dict[str, Any], dict[int, list[int]]]:
        """A prefill leg's answer with nothing cached, and what the gates' own hooks saw meanwhile."""
        self.prefill.rpc("kindred_take")
        answer = prefill_leg(self.prefill.url, prompt, cache_salt=os.urandom(8).hex())
        return answer, {int(layer): row for layer, row in self.prefill.rpc("kindred_take").items()}


def decisions(router: Server) -> list[dict[str, Any]]:
    """Newest first."""
    return get_json(router.url + "/status")["decisions"]


def prefill_leg(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """The request that Kindred's router sends to a prefill server; its whole answer."""
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        **fields,
    }
    status, answer = post_json(url + "/v1/completions", body, timeout=120)
    assert status == 200, answer
    return answer


def counts_of(wire: dict[str, Any]) -> dict[int, list[int]]:
    """Layer -> counts, from the wire form."""
    data = np.frombuffer(base64.b64decode(wire["data"]), dtype="<u2" if wire["dtype"] == "u16" else "<u4")
    rows = data.reshape(len(wire["layers"]), wire["experts"])
    return {layer: row.tolist() for layer, row in zip(wire["layers"], rows, strict=True)}
