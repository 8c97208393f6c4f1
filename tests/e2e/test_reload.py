"""A router's life as its operator sees it: SIGHUP, PUT /config, SIGTERM. The workers are scripted."""

import concurrent.futures
import http.server
import json
import os
import signal
import threading

import pytest

from cluster import Server, get_json, post_json, request, stream, wait_until


class Backend(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server whose streams wait for `gate` before their end."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.gate = threading.Event()
        self.gate.set()
        self.requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "test"}]})
        else:
            self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests += 1
        if not body.get("stream"):
            self.answer(200, {"served_by": self.server.url})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i, data in enumerate([b"data: 1\n\n", b"data: [DONE]\n\n"]):
            if i > 0:
                self.server.gate.wait(20)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def backends():
    pair = [Backend(), Backend()]
    yield pair
    for backend in pair:
        backend.gate.set()
        backend.shutdown()


def open_stream(router):
    return stream(router.url + "/v1/chat/completions", {"model": "m", "messages": [], "stream": True})


def start(tmp_path, config, *args):
    path = tmp_path / "fleet.yaml"
    path.write_text(config)
    router = Server("router", "--config", path, "--health-interval-ms", 50, *args, log=tmp_path / "router.log", path="/ready")
    router.wait_ready()
    return router, path


def ask(router):
    status, body = post_json(router.url + "/v1/chat/completions", {"model": "m", "messages": []})
    assert status == 200, body
    return body["served_by"]


def test_sighup_changes_workers_and_an_invalid_file_changes_nothing(tmp_path, backends):
    old, new = backends
    router, path = start(tmp_path, f"worker: [{old.url}]\nretries: 3\n")
    try:
        assert ask(router) == old.url
        old.gate.clear()
        events = stream(router.url + "/v1/chat/completions", {"model": "m", "messages": [], "stream": True})
        assert next(events) == "1"
        path.write_text(f"worker: [{new.url}]\nretries: 1\n")
        router.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: get_json(router.url + "/config")["retries"] == 1, what="the new configuration")
        wait_until(lambda: request(router.url + "/ready")[0] == 200, what="the new worker")
        assert ask(router) == new.url
        old.gate.set()  # the stream from before goes on to its end
        assert list(events) == ["[DONE]"]

        path.write_text(f"worker: [{old.url}]\nretries: -1\ntau: 9\nbananas: 3\n")
        router.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: router.text().count("new configuration refused") == 3, what="all reasons in the log")
        for reason in ("retries: got '-1'", "tau: got '9'", "unknown key 'bananas'"):
            assert reason in router.text()
        assert get_json(router.url + "/config")["retries"] == 1
        assert ask(router) == new.url
        assert router.terminate() == 0
    finally:
        router.stop()


def test_put_config(tmp_path, backends):
    router, _ = start(tmp_path, f"worker: [{backends[0].url}]\n", "--manage-workers")
    try:
        status, _, body = request(router.url + "/config", "PUT", f"worker: [{backends[1].url}]\nretries: 5\n".encode())
        assert status == 200, body
        assert json.loads(body)["retries"] == 5
        wait_until(lambda: request(router.url + "/ready")[0] == 200, what="the new worker")
        assert ask(router) == backends[1].url
        status, _, body = request(router.url + "/config", "PUT", b"retries: x\ndecode_policy: best\nport: 1\n")
        assert status == 400
        assert [r["field"] for r in json.loads(body)["error"]["reasons"]] == ["retries", "decode_policy"]
        status, _, body = request(router.url + "/config", "PUT", b"host: 0.0.0.0\n")
        assert status == 400
        assert "restart" in json.loads(body)["error"]["message"]
        assert get_json(router.url + "/config")["retries"] == 5
    finally:
        router.stop()


def test_sigterm_lets_streams_finish_and_ends_with_0(tmp_path, backends):
    router, _ = start(tmp_path, f"worker: [{backends[0].url}]\n")
    try:
        backends[0].gate.clear()
        events = stream(router.url + "/v1/chat/completions", {"model": "m", "messages": [], "stream": True})
        assert next(events) == "1"
        router.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: "no new requests" in router.text(), what="the drain")
        with pytest.raises(OSError):
            request(router.url + "/health", timeout=2)
        assert router.popen.poll() is None
        backends[0].gate.set()
        assert list(events) == ["[DONE]"]
        assert router.popen.wait(20) == 0
    finally:
        router.stop()


def test_several_threads_reload_and_drain_as_one_router(tmp_path, backends):
    old, new = backends
    router, path = start(tmp_path, f"worker: [{old.url}]\nthreads: 4\n")
    try:
        assert len(os.listdir(f"/proc/{router.popen.pid}/task")) >= 4
        assert get_json(router.url + "/config")["threads"] == 4
        old.gate.clear()
        begun = [open_stream(router) for _ in range(8)]
        assert [next(events) for events in begun] == ["1"] * 8
        path.write_text(f"worker: [{new.url}]\nthreads: 2\n")
        router.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: "threads: cannot change" in router.text(), what="the refusal")
        path.write_text(f"worker: [{new.url}]\nthreads: 4\n")
        router.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: "the new configuration runs" in router.text(), what="the new configuration")
        wait_until(lambda: request(router.url + "/ready")[0] == 200, what="the new worker")
        with concurrent.futures.ThreadPoolExecutor(16) as clients:
            served = list(clients.map(lambda _: ask(router), range(64)))
        assert served == [new.url] * 64
        assert new.requests == 64
        router.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: "8 in flight may finish" in router.text(), what="the drain")
        old.gate.set()
        assert [list(events) for events in begun] == [["[DONE]"]] * 8
        assert router.popen.wait(20) == 0
    finally:
        router.stop()
