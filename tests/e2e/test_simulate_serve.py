"""The router in front of `kindred simulate --serve`: mock workers in real time, and faults by script."""

import contextlib
import http.client
import json

import pytest

from cluster import Process, Server, chat, free_port, get_json, metric, post_json, request, stream, wait_until

CHAT = "/v1/chat/completions"


def text_of(events):
    pieces = [json.loads(e)["choices"] for e in events if e != "[DONE]"]
    return "".join(c[0]["delta"].get("content", "") for c in pieces if c)


@contextlib.contextmanager
def mock_fleet(tmp_path, workers, *args, router_args=(), faults=None):
    """(the router, the URLs of its workers)."""
    if faults is not None:
        script = tmp_path / "faults.json"
        script.write_text(json.dumps(faults))
        args = [*args, "--faults", script]
    log = tmp_path / "fleet.log"
    small = ["--profile", "h200-gpt-oss-20b", "--domains", 2]  # starts soon
    serve = Process("simulate", "--serve", "--workers", workers, "--port", 0, *small, *args, log=log)
    with contextlib.ExitStack() as ending:
        ending.callback(serve.stop)

        def started():
            assert serve.popen.poll() is None, serve.text()
            return "ready; a router for them:" in serve.text()

        wait_until(started, 60, "mock fleet ready")
        command = serve.text().split("ready; a router for them:\n")[1].split("\n")[0].split()
        assert command[:2] == ["kindred", "router"]
        router = Server(*command[1:], "--health-interval-ms", 200, *router_args, log=tmp_path / "router.log")
        ending.callback(router.stop)
        router.wait_ready("/ready")
        yield router, [arg for arg in command if arg.startswith("http://") and "=" not in arg]
        assert serve.terminate() == 0, serve.text()


def wait_leases_gone(workers):
    for url in workers:
        wait_until(lambda: metric(url, "kindred_leases") == 0, 10, f"no lease left at {url}")


@pytest.mark.parametrize("dialect,workers", [("kindred", "1P2D"), ("vllm", "1P2D"), ("sglang", "1P2D"), ("openai", "2B")])
def test_each_dialect_streams_whole_answers(tmp_path, dialect, workers):
    with mock_fleet(tmp_path, workers, "--dialect", dialect) as (router, urls):
        events = list(stream(router.url + CHAT, chat(model="simulated", max_tokens=30, stream=True)))
        assert events[-1] == "[DONE]"
        status, whole = post_json(router.url + CHAT, chat(model="simulated", max_tokens=30))
        assert status == 200, whole
        assert whole["choices"][0]["message"]["content"] == text_of(events)
        assert len(text_of(events).split()) == 30
        wait_leases_gone(urls)
        assert post_json(router.url + CHAT, chat(model="simulated", n=2))[0] == 400


def test_counts_reach_the_locality_policy(tmp_path):
    cohorts = tmp_path / "cohorts.safetensors"
    with mock_fleet(tmp_path, "1P2D", "--cohorts-output", cohorts) as (router, _):
        for i in range(12):
            assert post_json(router.url + CHAT, chat(model="simulated", prompt=f"question {i}", max_tokens=4))[0] == 200
        assert metric(router.url, "kindred_router_similarity_count") >= 12
        assert metric(router.url, "kindred_router_fallbacks_total") == 0
        assert metric(router.url, "kindred_router_bad_counts_total") == 0


def test_kv_events_bring_prompts_to_whom_holds_them(tmp_path):
    with mock_fleet(tmp_path, "2P1D", "--kv-events-port", 0) as (router, urls):
        prompts = [f"{i}: " + "a long beginning that many questions share " * 20 for i in range(4)]
        ask = lambda p: post_json(router.url + CHAT, chat(model="simulated", prompt=p, max_tokens=2))
        for prompt in prompts:
            assert ask(prompt)[0] == 200
        wait_until(lambda: get_json(router.url + "/status")["prefixes"]["exact"]["blocks"] > 0, 10, "events arrive")
        for prompt in prompts:
            assert ask(prompt + "and more")[0] == 200
        cached = sum(metric(url, "vllm:prefix_cache_hits_total") for url in urls[:2])
        assert cached >= 4 * 200, cached  # each second request finds nearly all of its 200 and more tokens


def test_wrong_counts_are_noticed(tmp_path):
    cohorts = tmp_path / "cohorts.safetensors"
    faults = [{"at_s": 0, "worker": 0, "kind": "wrong_counts"}]
    with mock_fleet(tmp_path, "1P2D", "--cohorts-output", cohorts, faults=faults) as (router, _):
        assert post_json(router.url + CHAT, chat(model="simulated", max_tokens=4))[0] == 200
        assert metric(router.url, "kindred_router_bad_counts_total") == 1


@pytest.mark.parametrize("dialect", ["kindred", "vllm", "sglang"])
def test_killed_decode_workers_take_down_their_own_requests_at_most(tmp_path, dialect):
    # Streams of about 5 s that the first kill cuts; the other decode worker and then the whole fleet serve on.
    faults = [{"at_s": 6, "worker": 1, "kind": "kill", "for_s": 2}]
    with mock_fleet(tmp_path, "1P2D", "--dialect", dialect, faults=faults) as (router, urls):
        ended = {"whole": 0, "error": 0, "cut": 0}

        def play(i):
            body = chat(model="simulated", prompt=f"tell me more about {i}", max_tokens=400, stream=True)
            events = []
            try:
                for event in stream(router.url + CHAT, body):
                    events.append(event)
            except (http.client.HTTPException, OSError):
                ended["error" if events and '"error"' in events[-1] else "cut"] += 1
                return
            assert events[-1] == "[DONE]" or '"error"' in events[-1]
            ended["whole" if events[-1] == "[DONE]" else "error"] += 1

        def dead():
            with contextlib.suppress(OSError):
                request(urls[1] + "/health", timeout=5)
                return False
            return True

        n = 0
        while not dead():
            play(n)
            n += 1
        for i in range(4):  # while it is down: only the other one is left
            play(1000 + i)
        wait_until(lambda: not dead(), 20, "the worker is back")
        play(2000)
        assert ended["cut"] == 0, ended
        assert ended["whole"] >= n + 4, ended
        wait_leases_gone(urls)


@pytest.mark.parametrize(
    "args,says",
    [
        (["--workers", "2X"], "--workers"),
        (["--workers", ""], "--workers"),
        (["--profile", "no-such"], "--profile"),
        (["--dialect", "other"], "dialect"),
        (["--dialect", "openai", "--workers", "1P1D"], "dialect"),
        (["--faults", "no-such-file"], "--faults"),
        (["--cohorts-output", "x", "--workers", "1B"], "--cohorts-output"),
    ],
)
def test_bad_options_are_named(tmp_path, args, says):
    process = Process("simulate", "--serve", "--port", 0, *args, log=tmp_path / "log")
    try:
        assert process.popen.wait(60) in (1, 2)
        assert says in process.text()
    finally:
        process.stop()


def test_a_port_in_use_is_named(tmp_path):
    port = free_port()
    first = Server("simulate", "--serve", "--workers", "1B", "--dialect", "openai", log=tmp_path / "first", port=port)
    try:
        first.wait_ready()
        assert get_json(first.url + "/v1/models")["data"][0]["id"] == "simulated"
        second = Process("simulate", "--serve", "--workers", "1B", "--port", port, log=tmp_path / "second")
        assert second.popen.wait(60) == 1
        assert str(port) in second.text()
        second.stop()
    finally:
        first.stop()
