"""A fault takes down its own request at most: the client gets a full answer or a well-formed error."""

import http.client
import http.server
import json
import socket
import subprocess
import threading

import pytest

from cluster import ACTIVATIONS, BINARY, MODEL, Cluster, Server, chat, get_json, metric, post_json, request, stream, wait_until

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def victims(tmp_path):
    """A cluster of one's own, to be broken."""
    with Cluster(tmp_path, decode=2) as running:
        yield running


def read_until_error(events):
    """(events before the fault, the error event's message or None)."""
    seen = []
    try:
        for event in events:
            seen.append(event)
            if '"error"' in event:
                return seen[:-1], json.loads(event)["error"]["message"]
    except (http.client.HTTPException, OSError):
        return seen, None
    return seen, None


def test_decode_worker_dead_before_the_handoff(victims):
    victims.decode[0].kill()
    for i in range(6):
        assert post_json(victims.url + CHAT, chat(prompt=f"question {i}"))[0] == 200
    victims.wait_idle()


def test_all_decode_workers_dead(victims):
    for worker in victims.decode:
        worker.kill()
    status, answer = post_json(victims.url + CHAT, chat())
    assert status in (502, 503)
    assert answer["error"]["message"]
    victims.wait_idle()


def test_prefill_worker_dead(victims):
    victims.prefill[0].kill()
    status, answer = post_json(victims.url + CHAT, chat())
    assert status in (502, 503)
    assert answer["error"]["message"]
    wait_until(lambda: request(victims.url + "/ready")[0] == 503, 10, "router not ready")
    victims.wait_idle()


def test_decode_worker_dies_mid_stream(victims):
    streams = [stream(victims.url + CHAT, chat(prompt=f"story {i}", stream=True, **LONG)) for i in range(4)]
    for events in streams:
        for _ in range(5):
            next(events)
    victims.decode[0].kill()
    outcomes = [read_until_error(events) for events in streams]
    broken = [error for _, error in outcomes if error]
    finished = [seen for seen, error in outcomes if error is None]
    assert broken, "round robin put some of four on either worker"
    assert finished
    for seen in finished:  # the other worker's requests are unharmed
        assert seen[-1] == "[DONE]"
    for seen, error in outcomes:
        if error:
            assert "[DONE]" not in seen
    assert post_json(victims.url + CHAT, chat())[0] == 200
    victims.wait_idle()


def test_decode_worker_dies_on_a_whole_answer(victims):
    answers = []
    body = chat(**LONG)
    callers = [threading.Thread(target=lambda: answers.append(post_json(victims.url + CHAT, body))) for _ in range(4)]
    for caller in callers:
        caller.start()
    wait_until(lambda: all(metric(w.url, "vllm:num_requests_running") > 0 for w in victims.decode), 20, "both decode")
    victims.decode[1].kill()
    for caller in callers:
        caller.join()
    statuses = sorted(status for status, _ in answers)
    assert len(statuses) == 4
    assert set(statuses) <= {200, 502, 503}
    assert all(answer.get("choices") or answer["error"]["message"] for _, answer in answers)
    victims.wait_idle()


class _Proxy(http.server.ThreadingHTTPServer):
    """Stands before a prefill worker and spoils what `spoil(path, body)` says."""

    daemon_threads = True

    def __init__(self, target, spoil):
        self.target, self.spoil = target, spoil
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "content-length")}
        status, answer_headers, answer = request(self.server.target + self.path, self.command, body, headers)
        answer = self.server.spoil(self.path, answer)
        if answer is None:  # as if the process had died
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(status)
        for key, value in answer_headers.items():
            if key.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = _relay

    def log_message(self, *_):
        pass


SPOILS = {
    "a bit of the KV flipped": lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:],
    "KV cut short": lambda b: b[: len(b) // 2],
    "KV empty": lambda b: b"",
    "other bytes altogether": lambda b: bytes(len(b)),
    "died during the pull": lambda b: None,
}


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("streamed", [False, True])
def test_spoilt_kv(cluster, tmp_path, how, streamed):
    spoil = SPOILS[how]
    broken = [True]
    proxy = _Proxy(cluster.prefill[0].url, lambda path, b: spoil(b) if path.startswith("/v1/kv/") and broken[0] else b)
    decode = Server("worker", "--model", MODEL, "--role", "decode", "--threads", 1, "--peer", proxy.url, log=tmp_path / "d.log")
    router = None
    try:
        decode.wait_ready()
        router = Server("router", "--prefill", proxy.url, "--decode", decode.url, log=tmp_path / "r.log").wait_ready("/ready")
        if streamed:
            seen, error = read_until_error(stream(router.url + CHAT, chat(stream=True)))
            assert error and seen and "[DONE]" not in seen
        else:
            status, answer = post_json(router.url + CHAT, chat())
            assert status in (502, 503)
            assert answer["error"]["message"]
        broken[0] = False  # and it still serves
        assert post_json(router.url + CHAT, chat())[0] == 200
        wait_until(lambda: metric(cluster.prefill[0].url, "kindred_leases") == 0, 10, "lease released")
    finally:
        for process in (router, decode):
            if process:
                process.stop()
        proxy.shutdown()


def test_leases_expire(cluster, tmp_path):
    prefill = Server("worker", "--model", MODEL, "--role", "prefill", "--lease-ttl-ms", 2000, log=tmp_path / "p.log").wait_ready()
    try:
        headers = {"X-Kindred-Leg": "prefill", "X-Request-Id": "lost"}
        status, reply = post_json(prefill.url + CHAT, chat(), headers)
        assert status == 200 and not reply["finished"]
        assert metric(prefill.url, "kindred_lease_bytes") > 0
        wait_until(lambda: metric(prefill.url, "kindred_leases") == 0, 20, "lease expired")
        assert metric(prefill.url, "kindred_lease_bytes") == 0
        assert request(prefill.url + "/v1/kv/" + reply["lease"]["id"])[0] == 404
    finally:
        prefill.stop()


@pytest.mark.parametrize("streamed", [False, True])
def test_client_leaves(cluster, streamed):
    body = json.dumps(chat(stream=streamed, **LONG)).encode()
    with socket.create_connection(("127.0.0.1", cluster.router.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: sum(metric(w.url, "vllm:num_requests_running") for w in cluster.decode) > 0, 20, "decoding")
    cluster.wait_idle()
    for worker in cluster.decode:
        assert metric(worker.url, "vllm:kv_cache_usage_perc") == 0


def test_cohorts_of_another_model_degrade_to_load_and_are_counted(cluster, tmp_path, foreign_cohorts):
    router = cluster.start_router("--decode-policy", "locality-band", "--cohorts", foreign_cohorts, name="foreign")
    try:
        assert post_json(router.url + CHAT, chat())[0] == 200
        assert metric(router.url, "kindred_router_fallbacks_total", reason="other_model") == 1
        decision = get_json(router.url + "/status?decisions=1")["decisions"][0]
        assert decision["fallback"] == "other_model"
    finally:
        router.stop()


@pytest.fixture
def foreign_cohorts(tmp_path):
    """Good cohorts for two workers, but of a model nobody here serves."""
    path = tmp_path / "cohorts.safetensors"
    fit = [BINARY, "fit", ACTIVATIONS, "--workers", "2", "--output", path]
    subprocess.run(fit, check=True, capture_output=True, timeout=60)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["model_fingerprint"] = "0123456789abcdef"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return path


def test_sigterm_drains(tmp_path):
    with Cluster(tmp_path, decode=1) as own:
        events = stream(own.url + CHAT, chat(stream=True, max_tokens=300, ignore_eos=True))
        next(events)
        codes = []
        stopper = threading.Thread(target=lambda: codes.append(own.router.terminate(30)))
        stopper.start()
        assert list(events)[-1] == "[DONE]"
        stopper.join()
        assert codes == [0]
        assert own.decode[0].terminate() == 0


def test_status_and_metrics_hold_no_prompt(cluster):
    secret = "canary-7f3a91"
    assert post_json(cluster.url + CHAT, chat(prompt=f"The word is {secret}."))[0] == 200
    for path in ("/status?decisions=1000", "/metrics"):
        assert secret.encode() not in request(cluster.url + path)[2]
    for process in (cluster.router, *cluster.workers):
        assert secret not in process.text()
