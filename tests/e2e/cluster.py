"""Starts real kindred processes for the end-to-end tests, and speaks plain HTTP to them."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("KINDRED_BINARY", ROOT / "build/release/kindred"))
MODEL = ROOT / "models/kindred-tiny-moe-q8_0.gguf"
ACTIVATIONS = ROOT / "models/kindred-tiny-moe.activations.safetensors"
START_TIMEOUT_S = 60


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def request(url, method="GET", body=None, headers=None, timeout=60):
    """(status, headers, bytes). `body` may be bytes or something for json.dumps."""
    parts = urllib.parse.urlsplit(url)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    with contextlib.closing(connection):
        target = parts.path + ("?" + parts.query if parts.query else "")
        all_headers = {"Content-Type": "application/json"} if body is not None else {}
        all_headers.update(headers or {})
        connection.request(method, target, body, all_headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def get_json(url):
    status, _, body = request(url)
    assert status == 200, (url, status, body)
    return json.loads(body)


def post_json(url, body, headers=None, timeout=60):
    status, _, answer = request(url, "POST", body, headers, timeout)
    return status, json.loads(answer)


def stream(url, body, headers=None, timeout=60):
    """The data of each SSE event, as it comes. Raises http.client.IncompleteRead on a cut stream."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        data = []
        while line := response.readline():
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data: "):
                data.append(line[6:].decode())
            elif not line and data:
                yield "\n".join(data)
                data = []


def metric(url, name, **labels):
    """The sum over the series of that name that have those labels."""
    total = 0.0
    for line in request(url + "/metrics")[2].decode().splitlines():
        series, _, value = line.rpartition(" ")
        bare, _, rest = series.partition("{")
        if bare == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
            total += float(value)
    return total


def wait_until(condition, timeout_s=10, what="condition"):
    """Polls: tests wait for an event, never for a length of time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"timed out after {timeout_s} s: {what}")


class Process:
    def __init__(self, *args, log):
        self.log = pathlib.Path(log)
        self._out = self.log.open("wb")
        env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        self.popen = subprocess.Popen([BINARY, *map(str, args)], stdout=self._out, stderr=subprocess.STDOUT, env=env)

    def kill(self):
        self.popen.kill()
        self.popen.wait()

    def terminate(self, timeout_s=20):
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout_s)

    def stop(self):
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._out.close()

    def text(self):
        return self.log.read_text(errors="replace")


class Server(Process):
    """A kindred process that listens."""

    def __init__(self, *args, log, port=None, path="/health"):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(*args, "--port", self.port, log=log)
        self._ready_path = path

    def wait_ready(self, path=None):
        def ready():
            assert self.popen.poll() is None, f"exited with {self.popen.returncode}:\n{self.text()}"
            try:
                return request(self.url + (path or self._ready_path), timeout=5)[0] == 200
            except OSError:
                return False

        wait_until(ready, START_TIMEOUT_S, f"{self.log.name} ready:\n{self.text()}")
        return self


class Cluster:
    """Prefill and decode workers, a single worker that does both, and a router. A context manager."""

    def __init__(self, tmp, prefill=1, decode=2, both=0, worker_args=(), router_args=(), decode_args=()):
        self.tmp = pathlib.Path(tmp)
        common = ["--model", MODEL, "--threads", 1, *worker_args]
        self.prefill = [self._worker(f"p{i}", "prefill", common) for i in range(prefill)]
        peers = [arg for w in self.prefill for arg in ("--peer", w.url)]
        self.decode = [self._worker(f"d{i}", "decode", [*common, *peers, *decode_args]) for i in range(decode)]
        self.both = [self._worker(f"b{i}", "both", common) for i in range(both)]
        self._router_args = router_args
        self.router = None

    def _worker(self, name, role, args):
        return Server("worker", "--role", role, *args, log=self.tmp / f"{name}.log")

    def __enter__(self):
        try:
            for worker in self.workers:
                worker.wait_ready()
            self.router = self.start_router(*self._router_args)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_router(self, *args, name="router"):
        urls = [arg for role in ("prefill", "decode") for w in getattr(self, role) for arg in (f"--{role}", w.url)]
        router = Server("router", *urls, "--health-interval-ms", 200, *args, log=self.tmp / f"{name}.log")
        return router.wait_ready("/ready")

    def __exit__(self, *_):
        for process in [*([self.router] if self.router else []), *self.workers]:
            process.stop()

    @property
    def workers(self):
        return [*self.prefill, *self.decode, *self.both]

    @property
    def url(self):
        return self.router.url

    def inflight(self):
        return sum(w["in_flight"] for w in get_json(self.url + "/status")["workers"])

    def wait_idle(self):
        wait_until(lambda: self.inflight() == 0, 10, "no request in flight at the router")
        for worker in self.workers:
            if worker.popen.poll() is None:
                wait_until(lambda: metric(worker.url, "vllm:num_requests_running") == 0, 10, "workers idle")
                wait_until(lambda: metric(worker.url, "kindred_leases") == 0, 10, "no lease left")


def chat(prompt="Write a short story about the sea.", **fields):
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "temperature": 0, **fields}
