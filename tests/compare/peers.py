"""The routers that are compared, each started by what its own documentation recommends.

Each has a virtual environment of its own (./dev compare makes them from requirements/compare-*.txt).
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from cluster import BINARY, free_port, request, wait_until  # noqa: E402, F401

START_TIMEOUT_S = 90
HEALTH_INTERVAL_S = 1
VENVS = ROOT / "build/compare"


@dataclasses.dataclass
class Peer:
    name: str
    program: list
    plain: list  # turn by turn over whole workers
    pd: dict  # by engine: what goes before the URLs; or, as a string, why it is left out
    dp_port: bool = False  # --prefill URL PORT, the bootstrap port behind it
    common: list = dataclasses.field(default_factory=list)
    one_at_a_time: list = dataclasses.field(default_factory=list)  # flags for: one request, and no queue

    def version(self):
        if self.name == "kindred":
            text = subprocess.run([BINARY, "version"], capture_output=True, text=True).stdout
            return next((word for word in text.split() if word[0].isdigit()), "this tree")
        pip = VENVS / self.name / "bin/pip"
        shown = subprocess.run([pip, "show", self.name], capture_output=True, text=True).stdout
        return next(line.split()[1] for line in shown.splitlines() if line.startswith("Version:"))


def _venv(name):
    return str(VENVS / name / "bin" / name)


# What all three of them share: one code base's children. Health checks as often as Kindred's; retries and breakers
# as they come. Rate limiting is off in two of them unless it is asked for, so nothing is to be turned off.
_CHILDREN = ["--health-check-interval-secs", HEALTH_INTERVAL_S, "--health-failure-threshold", 1]
_CHILDREN += ["--health-success-threshold", 1, "--log-level", "warn"]
_ONE = ["--max-concurrent-requests", 1, "--queue-size", 0]

PEERS = [
    Peer(
        "kindred",
        [str(BINARY), "router"],
        plain=["--decode-policy", "round-robin"],
        pd={"vllm": ["--decode-policy", "least-loaded"], "sglang": ["--decode-policy", "least-loaded"]},
        common=["--health-interval-ms", HEALTH_INTERVAL_S * 1000],
        one_at_a_time=["--max-inflight", 1, "--queue", 0],
    ),
    Peer(
        "smg",
        [_venv("smg"), "launch"],
        plain=["--policy", "round_robin"],
        pd={
            "sglang": ["--pd-disaggregation", "--prefill-policy", "cache_aware", "--decode-policy", "power_of_two"],
            "vllm": "asks a prefill server that is named by its URL for no KV transfer: its prompts are computed twice",
        },
        dp_port=True,
        common=_CHILDREN,
        one_at_a_time=_ONE,
    ),
    Peer(
        "sglang-router",
        [_venv("sglang-router"), "launch"],
        plain=["--policy", "round_robin"],
        pd={"sglang": ["--pd-disaggregation", "--prefill-policy", "cache_aware", "--decode-policy", "power_of_two"]},
        dp_port=True,
        common=_CHILDREN,
        one_at_a_time=_ONE,
    ),
    Peer(
        "vllm-router",
        [_venv("vllm-router")],
        plain=["--policy", "round_robin"],
        pd={"vllm": ["--vllm-pd-disaggregation", "--prefill-policy", "cache_aware", "--decode-policy", "power_of_two"]},
        common=[*_CHILDREN[:-1], "warning"],
        one_at_a_time=_ONE,
    ),
]


class Running:
    """One router's process, and what its children use of the processor."""

    def __init__(self, peer, args, log):
        self.peer, self.port = peer, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = pathlib.Path(log)
        command = [*peer.program, "--host", "127.0.0.1", "--port", self.port, *peer.common, *args]
        if peer.name != "kindred":
            command += ["--prometheus-port", free_port()]
        self.command = [str(part) for part in command]
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )

    def processor_s(self):
        """So far, of the whole group; schedstat has nanoseconds."""
        total = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rsplit(")", 1)[1].split()[2]) != self.popen.pid:
                    continue
                for task in stat.parent.glob("task/*/schedstat"):
                    total += int(task.read_text().split()[0])
        return total / 1e9

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def tail(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def _environment():
    # Nothing of the caller's Python, and no proxies before 127.0.0.1.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and not k.lower().endswith("_proxy")}
    return {**kept, "OMP_WAIT_POLICY": "passive"}


def plain_args(peer, workers):
    if peer.name == "kindred":
        return [*peer.plain, *(arg for url in workers for arg in ("--worker", url))]
    return [*peer.plain, "--worker-urls", *workers]


def pd_args(peer, engine, prefill, decode, bootstrap_ports):
    """A string: why it has no such mode for this engine over HTTP."""
    found = peer.pd.get(engine, "no such mode")
    if isinstance(found, str):
        return found
    args = list(found)
    for url, port in zip(prefill, bootstrap_ports, strict=True):
        args += ["--prefill", url]
        if peer.dp_port:
            args.append(port)
    return [*args, *(arg for url in decode for arg in ("--decode", url))]


@contextlib.contextmanager
def started(peer, args, log, answers):
    """The router, once `answers(url)` is true: all of them listen before they know their workers."""
    router = Running(peer, args, log)
    try:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if answers(router.url):
                    break
            if router.popen.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{peer.name} does not answer ({' '.join(router.command)}):\n{router.tail()}")
            time.sleep(0.05)
        yield router
    finally:
        router.stop()


def answers_chat(body):
    def ask(url):
        return request(url + "/v1/chat/completions", "POST", body, timeout=10)[0] == 200

    return ask
