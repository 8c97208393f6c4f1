"""Bad input gets a clear error that names the field, and harms nobody else."""

import json
import subprocess

import pytest

from cluster import BINARY, MODEL, Server, chat, free_port, get_json, post_json, request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b'{"messages":' + b"[" * 100_000

# (path, body, status, param): through the router and straight to a worker, the same answer.
BAD = [
    (CHAT, b"not json", 400, None),
    (CHAT, b"", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}]', 400, None),
    (CHAT, b'{"messages":"\xff\xfe"}', 400, None),
    (CHAT, DEEP, 400, None),
    (CHAT, {"max_tokens": 3}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
    (CHAT, chat(model="no-such-model"), 404, "model"),
    (CHAT, chat(model=5), 400, "model"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(n=1_000_000), 400, "n"),
    (CHAT, chat(n=2.5), 400, "n"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**18), 400, "max_tokens"),
    (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(stop=["a"] * 1000), 400, "stop"),
    (CHAT, chat(stop=[""]), 400, "stop"),
    (CHAT, chat(frequency_penalty=9), 400, "frequency_penalty"),
    (CHAT, chat(logit_bias={"99999999": 1}), 400, "logit_bias"),
    (CHAT, chat(top_logprobs=500, logprobs=True), 400, "top_logprobs"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, chat(kv_transfer_params={"do_remote_decode": True}), 400, "kv_transfer_params"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"kv_tr\\u0061nsfer_params":{}}', 400, "kv_transfer_params"),
    (CHAT, chat(bootstrap_host="evil"), 400, "bootstrap_host"),
    (CHAT, chat(prompt="word " * 20_000), 400, "messages"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, 400, "prompt"),
    (TEXT, {"prompt": [1, 2, 99_999_999]}, 400, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt"),
    (TEXT, {"prompt": "a", "echo": True}, 400, "echo"),
]


@pytest.mark.parametrize("through", ["router", "worker"])
@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=lambda v: str(v)[:40])
def test_bad_request(cluster, through, path, body, status, param):
    url = cluster.url if through == "router" else cluster.both[0].url
    got, _, raw = request(url + path, "POST", body)
    assert got == status, raw
    error = json.loads(raw)["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    if param:
        assert error["param"].startswith(param), error


def test_the_cluster_still_serves(cluster):
    for path, body, *_ in BAD:
        request(cluster.url + path, "POST", body)
    assert post_json(cluster.url + CHAT, chat())[0] == 200
    cluster.wait_idle()


def test_an_unknown_model_is_told_what_is_served(cluster):
    served = get_json(cluster.url + "/v1/models")["data"][0]["id"]
    assert served in post_json(cluster.url + CHAT, chat(model="x"))[1]["error"]["message"]


def test_unknown_paths_and_methods(cluster):
    for url in (cluster.url, cluster.both[0].url):
        assert request(url + "/v1/nothing")[0] == 404
        assert request(url + CHAT)[0] == 405


def test_a_worker_keeps_to_its_role(cluster):
    for worker in (*cluster.prefill, *cluster.decode):
        status, answer = post_json(worker.url + CHAT, chat())
        assert status == 400
        assert "worker" in answer["error"]["message"] and "X-Kindred-Leg" in answer["error"]["message"]


def test_body_over_the_limit(cluster, tmp_path):
    router = cluster.start_router("--body-bytes", 10_000, name="small-bodies")
    try:
        status, answer = post_json(router.url + CHAT, chat(prompt="x" * 20_000))
        assert status == 413
        assert "10000" in answer["error"]["message"]
        assert post_json(router.url + CHAT, chat())[0] == 200
    finally:
        router.stop()


# --- files and flags ------------------------------------------------------------------------------


def run(*args):
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_truncated_model(tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(MODEL.read_bytes()[: 1 << 20])
    code, error = run("worker", "--model", cut, "--port", free_port())
    assert code == 1
    assert "cut.gguf" in error and "truncated" in error


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_not_a_model(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    code, error = run("worker", "--model", path, "--port", free_port())
    assert code == 1
    assert "x.gguf" in error


def test_no_such_model():
    code, error = run("worker", "--model", "/no/such.gguf", "--port", free_port())
    assert code == 1
    assert "/no/such.gguf" in error


def test_port_in_use(cluster):
    port = cluster.router.port
    code, error = run("router", "--worker", "http://127.0.0.1:1", "--port", port)
    assert code == 1
    assert str(port) in error and "in use" in error
    code, error = run("worker", "--model", MODEL, "--port", port)
    assert code == 1
    assert str(port) in error and "in use" in error


def test_config_with_an_unknown_key(tmp_path):
    config = tmp_path / "fleet.yaml"
    config.write_text("prefill: [http://127.0.0.1:1]\ndecode: [http://127.0.0.1:2]\ndecode_polcy: random\n")
    code, error = run("router", "--config", config)
    assert code == 2
    assert "fleet.yaml:3" in error and "decode_polcy" in error and "'decode_policy'" in error


def test_config_with_a_wrong_value(tmp_path):
    code, error = run("router", "--decode-policy", "best", "--worker", "http://127.0.0.1:1")
    assert code == 2
    assert "locality-band" in error and "round-robin" in error


@pytest.mark.parametrize("threads", [0, 257, -1, "all"])
def test_a_wrong_number_of_threads(threads):
    code, error = run("router", "--worker", "http://127.0.0.1:1", "--threads", threads)
    assert code == 2
    assert f"--threads: got '{threads}', accepted: a whole number from 1 to 256" in error


@pytest.mark.parametrize("model, arguments, status, words", [
    (MODEL, ["--expert-ranks", "two"], 2, ["--expert-ranks: got 'two', accepted: auto, or 0 to 1024"]),
    (MODEL, ["--expert-ranks", 65], 1, ["expert_ranks", "accepted: 1..64"]),
    (MODEL, ["--expert-placement", "auto"], 2, ["--expert-placement needs --expert-ranks"]),
    (MODEL, ["--expert-ranks", 2, "--expert-placement", "/no/such.json"], 1, ["/no/such.json"]),
    (MODEL, ["--expert-ranks", 3, "--expert-placement", "auto"], 1, ["64 experts on 3 ranks", "as many each"]),
    (MODEL, ["--expert-ranks", 2, "--expert-solver", "best"], 2, ["--expert-solver", "flow, greedy, eplb"]),
    (MODEL.parent.parent / "tests/data/dense.gguf", ["--expert-ranks", 2], 1, ["dense.gguf", "no experts"]),
])
def test_expert_ranks_that_cannot_be(model, arguments, status, words):
    code, error = run("worker", "--model", model, "--port", free_port(), *arguments)
    assert code == status, error
    for word in words:
        assert word in error


def test_a_dense_model_serves_without_signatures(tmp_path):
    dense = MODEL.parent.parent / "tests/data/dense.gguf"
    worker = Server("worker", "--model", dense, "--role", "both", log=tmp_path / "dense.log").wait_ready()
    try:
        status, answer = post_json(worker.url + TEXT, {"prompt": [5, 6, 7], "max_tokens": 4, "return_expert_counts": True})
        assert status == 200
        assert "expert_counts" not in answer
        assert get_json(worker.url + "/v1/models")["data"][0]["kindred"]["experts"] == 0
    finally:
        worker.stop()
