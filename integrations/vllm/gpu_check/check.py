"""What a CPU cannot show: counts with CUDA graphs, and the EPLB policy on two GPUs. NOT RUN YET by anybody.

usage: check.py MODEL      with 2 GPUs, e.g. check.py Qwen/Qwen3-30B-A3B; about 15 minutes

Expected output (counts and times differ; every line must end in ok):

    eager: 12 prompts, counts equal the gates' hooks: ok
    graphs: 12 prompts, 99.9 % of selections equal eager's: ok
    graphs: a prompt sent twice has the same counts: ok
    eplb: experts rearranged by Kindred's policy: ok
    eplb: 12 of 12 answers equal those without it: ok
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))

from vllm_fleet import PLUGIN, counts_of  # noqa: E402

PORT = 8399
START_TIMEOUT_S = 900
PROMPTS = [f"{verb} {what} in a few sentences." for verb in ("Explain", "Praise", "Doubt") for what in (
    "gravity", "a binary search in Python, with code", "das Brandenburger Tor, auf Deutsch", "contract law"
)]  # fmt: skip


class Server:
    def __init__(self, name: str, model: str, args: list[str], env: dict[str, str] | None = None) -> None:
        self.log = pathlib.Path(f"gpu-check-{name}.log")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(PORT)]
        command += ["--served-model-name", "m", "--max-model-len", "4096", *args]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(HERE.parent / "e2e"), **(env or {})}
        self._out = self.log.open("wb")
        self._process = subprocess.Popen(
            command, stdout=self._out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def __enter__(self) -> Server:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(1)
        self.__exit__()
        sys.exit(f"no server: see {self.log}")

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
        self._out.close()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def counts(self, prompt: str) -> dict[int, list[int]]:
        transfer = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": transfer}
        return counts_of(self.post("/v1/completions", body)["kv_transfer_params"]["expert_counts"])

    def text(self, prompt: str) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": 48, "temperature": 0}
        return self.post("/v1/completions", body)["choices"][0]["text"]

    def take(self) -> dict[int, list[int]]:
        seen = self.post("/collective_rpc", {"method": "kindred_take"})["results"][0]
        return {int(layer): row for layer, row in seen.items()}


def say(what: str, good: bool) -> bool:
    print(f"{what}: {'ok' if good else 'FAILED'}", flush=True)
    return good


def check_counts(model: str) -> bool:
    plugin = ["--kv-transfer-config", json.dumps(PLUGIN)]
    eager = []
    good = True
    with Server("eager", model, [*plugin, "--enforce-eager", "--worker-extension-cls", "hook.GateHook"]) as server:
        server.post("/collective_rpc", {"method": "kindred_watch"})
        for prompt in PROMPTS:
            server.take()
            eager.append(server.counts(prompt))
            good &= eager[-1] == server.take()
    good = say(f"eager: {len(eager)} prompts, counts equal the gates' hooks", good)
    with Server("graphs", model, plugin) as server:
        graphs = [server.counts(prompt) for prompt in PROMPTS]
        pairs = [(a, b) for x, y in zip(eager, graphs, strict=True) for k in x for a, b in zip(x[k], y[k], strict=True)]
        same = sum(min(a, b) for a, b in pairs) / sum(a for a, _ in pairs)
        good &= say(f"graphs: {len(graphs)} prompts, {100 * same:.1f} % of selections equal eager's", same > 0.995)
        good &= say("graphs: a prompt sent twice has the same counts", server.counts(PROMPTS[0]) == graphs[0])
    return good


def check_eplb(model: str) -> bool:
    parallel = ["--data-parallel-size", "2", "--enable-expert-parallel"]
    with Server("plain", model, parallel) as server:
        plain = [server.text(prompt) for prompt in PROMPTS]
    config = {"window_size": 50, "step_interval": 100, "num_redundant_experts": 16}
    balanced = [*parallel, "--enable-eplb", "--eplb-config", json.dumps(config)]
    with Server("eplb", model, balanced, {"KINDRED_VLLM_EPLB": "1"}) as server:
        for _ in range(4):
            texts = [server.text(prompt) for prompt in PROMPTS]
        log = server.log.read_text(errors="replace")
    ours = "EXPERIMENTAL: experts are placed by Kindred's policy" in log
    good = say("eplb: experts rearranged by Kindred's policy", ours and "Rearranged experts" in log)
    same = sum(a == b for a, b in zip(plain, texts, strict=True))
    return say(f"eplb: {same} of {len(texts)} answers equal those without it", same == len(texts)) and good


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    results = [check_counts(sys.argv[1]), check_eplb(sys.argv[1])]
    sys.exit(0 if all(results) else 1)
