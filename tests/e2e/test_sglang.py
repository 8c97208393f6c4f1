"""The router in front of scripted SGLang servers (sglang_server.py): both legs, the history of signatures, ranks."""

import contextlib

import pytest

from cluster import Server, chat, get_json, metric, post_json, request, wait_until
from sglang_server import EXPERTS, LAYERS, TOP_K, Rooms, SglangServer

CHAT = "/v1/chat/completions"
SHAPE = f"{LAYERS}x{EXPERTS}x{TOP_K}"
HISTORY = ["--history-shape", SHAPE, "--history-sample", 1]
REFIT = ["--refit", "--refit-interval-ms", 50, "--refit-window-ms", 60_000, "--refit-min-requests", 8, "--tau", 0, "--load-cap", 0]


class Fleet:
    """One prefill server, two decode servers, and routers before them."""

    def __init__(self, tmp_path, dp_size=1):
        self.tmp_path, rooms = tmp_path, Rooms()
        self.prefill = SglangServer("prefill", rooms, dp_size)
        self.decode = [SglangServer("decode", rooms) for _ in range(2)]
        self._routers = []

    def router(self, *args):
        urls = ["--prefill", self.prefill.url, *(arg for server in self.decode for arg in ("--decode", server.url))]
        router = Server("router", *urls, "--health-interval-ms", 200, *args, log=self.tmp_path / f"router{len(self._routers)}.log")
        self._routers.append(router)
        return router.wait_ready("/ready")

    def stop(self):
        for one in [*self._routers, self.prefill, *self.decode]:
            one.stop()


@pytest.fixture
def fleet(tmp_path):
    with contextlib.ExitStack() as ending:
        running = Fleet(tmp_path)
        ending.callback(running.stop)
        yield running


def prompt(domain, number, words=600):
    """`words` words that all prompts with that domain and number begin with."""
    return " ".join(f"{domain} {number} {i}" for i in range(words // 3))


def ask(router, domain, number, end="", **fields):
    status, answer = post_json(router.url + CHAT, chat(f"{prompt(domain, number)} {end}", model="m", **fields))
    assert status == 200, answer
    return get_json(router.url + "/status?decisions=1")["decisions"][0]


def learn(router):
    """Two domains, and cohorts of them."""
    for number in range(4):
        for domain in ("poetry", "code"):
            ask(router, domain, number)
    wait_until(lambda: (get_json(router.url + "/status")["cohorts"] or {}).get("count") == 2, 10, "a first fit")


def test_history_sends_what_begins_alike_to_the_same_decode_worker(fleet):
    router = fleet.router(*HISTORY, *REFIT)
    learn(router)
    # Nothing was known of those: load decided.
    assert all(d["known_share"] is None for d in get_json(router.url + "/status")["decisions"])

    def workers(domain):
        decisions = [ask(router, domain, number, "and another question", stream=False) for number in range(4)]
        assert all(d["reason"] == "band" and d["known_share"] > 0.8 for d in decisions), decisions
        return {d["decode_worker"] for d in decisions}

    poets, coders = workers("poetry"), workers("code")
    assert len(poets) == len(coders) == 1 and poets != coders
    assert ask(router, "history", 0)["fallback"] == "no_counts"  # a miss goes by load
    history = get_json(router.url + "/status")["history"]
    assert history["hits"] == 8 and history["misses"] == 9 and history["learned"] >= 8
    assert metric(router.url, "kindred_router_history_bytes") > 0
    assert metric(router.url, "kindred_router_history_refused_total") == 0


def test_clients_get_the_same_bytes_with_and_without(fleet):
    plain, asking = fleet.router("--decode-policy", "least-loaded"), fleet.router(*HISTORY, *REFIT)
    for path, text in ((CHAT, {"messages": [{"role": "user", "content": prompt("poetry", 0)}]}), ("/v1/completions", {"prompt": prompt("poetry", 1)})):
        for stream in (False, True):
            for wish in ({}, {"return_routed_experts": True}):
                body = {"model": "m", "max_tokens": 4, "stream": stream, **text, **wish}
                answers = [request(router.url + path, "POST", body) for router in (plain, asking)]
                assert answers[0][0] == answers[1][0] == 200
                assert answers[0][2] == answers[1][2]
                assert (b"routed_experts" in answers[1][2]) == bool(wish)
    decode_legs = [body for server in fleet.decode for body in server.seen]
    assert sum("return_routed_experts" in body for body in decode_legs) == len(decode_legs) / 2
    wait_until(lambda: get_json(asking.url + "/status")["history"]["learned"] >= 2, 10, "both paths' answers")


def test_what_is_wrong_is_never_routed_by(fleet):
    router = fleet.router(*HISTORY, *REFIT)
    for garbage in ("?" * 64, "A" * 64, "", "////" * 4 * LAYERS * TOP_K):
        fleet.prefill.garbage = garbage
        for stream in (False, True):
            for end in ("one", "two"):
                assert ask(router, "poetry", 0, end, stream=False)["known_share"] is None
            status, _, answer = request(router.url + CHAT, "POST", chat(prompt("poetry", 0), model="m", stream=stream))
            assert status == 200 and b"sglext" not in answer
    history = get_json(router.url + "/status")["history"]
    assert history["learned"] == history["prefixes"] == history["hits"] == 0
    for reason in ("encoding", "tokens", "expert"):
        assert metric(router.url, "kindred_router_history_refused_total", reason=reason) > 0, reason
    fleet.prefill.garbage = None
    ask(router, "poetry", 0)
    wait_until(lambda: get_json(router.url + "/status")["history"]["learned"] == 1, 10, "what is right")


def test_history_keeps_to_its_bytes(fleet):
    limit = 1 << 20  # about 300 prefixes of this shape
    router = fleet.router(*HISTORY, "--history-bytes", limit, *REFIT)
    for number in range(70):
        ask(router, "poetry", number)
    history = get_json(router.url + "/status")["history"]
    assert limit * 0.9 < history["bytes"] <= limit and history["evicted"] > 0, history
    assert ask(router, "poetry", 69)["known_share"] > 0.8
    assert ask(router, "poetry", 0)["known_share"] is None


def test_a_rank_is_chosen_by_its_load_and_pinned(tmp_path):
    with contextlib.ExitStack() as ending:
        fleet = Fleet(tmp_path, dp_size=3)
        ending.callback(fleet.stop)
        fleet.prefill.waiting_tokens = [9_000, 8_000, 10]
        router = fleet.router(*HISTORY, *REFIT, "--engine-policy", "pressure", "--load-interval-ms", 50)

        def engines():
            return get_json(router.url + "/status")["workers"][0]["engines"]

        wait_until(lambda: [e.get("waiting_prefill_tokens") for e in engines()] == [9_000, 8_000, 10], 10, "loads of three ranks")
        assert ask(router, "poetry", 0)["rank"] == 2
        prefill, decode = fleet.prefill.seen[0], [body for server in fleet.decode for body in server.seen][0]
        assert prefill["routed_dp_rank"] == 2 and decode["disagg_prefill_dp_rank"] == 2
        assert "routed_dp_rank" not in decode and prefill["return_routed_experts"] is True
        assert prefill["bootstrap_room"] == decode["bootstrap_room"] and prefill["bootstrap_room"] % 3 == 2
        fleet.prefill.waiting_tokens = [0, 8_000, 9_000]
        wait_until(lambda: [e.get("waiting_prefill_tokens") for e in engines()] == [0, 8_000, 9_000], 10, "new loads")
        assert ask(router, "code", 0)["rank"] == 0


def test_decides_in_the_shadow_and_in_turns(fleet):
    shadow = fleet.router(*HISTORY, *REFIT, "--decode-policy", "least-loaded", "--shadow-policy", "locality-band")
    learn(shadow)
    wanted = {domain: {ask(shadow, domain, number, "more")["shadow_worker"] for number in range(4)} for domain in ("poetry", "code")}
    assert all(len(workers) == 1 for workers in wanted.values()) and wanted["poetry"] != wanted["code"]
    turns = fleet.router(*HISTORY, *REFIT, "--experiment", "even: decode_policy=least-loaded", "--experiment", "near: decode_policy=locality-band",
                         "--experiment-slice-ms", 200, "--experiment-seam-ms", 20)
    learn(turns)
    policies = set()

    def both():
        policies.add(ask(turns, "poetry", 0, "more")["policy"])
        report = get_json(turns.url + "/experiment")
        return report["blocks_over"] >= 1 and len(policies) == 2

    wait_until(both, 10, "a block of both arms")
    assert policies == {"least-loaded", "locality-band"}


def test_whole_servers_and_load_by_metrics(tmp_path):
    server = SglangServer(dp_size=2)
    server.has_loads = False
    router = Server("router", "--worker", server.url, *HISTORY, "--load-interval-ms", 50, log=tmp_path / "router.log")
    with contextlib.ExitStack() as ending:
        ending.callback(server.stop)
        ending.callback(router.stop)
        router.wait_ready("/ready")
        wait_until(lambda: get_json(router.url + "/status")["workers"][0]["load"] is not None, 10, "a load")
        worker = get_json(router.url + "/status")["workers"][0]
        assert worker["dialect"] == "sglang" and worker["version"] == "0.5.23" and worker["load"]["waiting"] == 0
        for path, text in ((CHAT, {"messages": [{"role": "user", "content": prompt("poetry", 0)}]}), ("/v1/completions", {"prompt": prompt("poetry", 1)})):
            for stream in (False, True):
                body = {"model": "m", "max_tokens": 4, "stream": stream, **text}
                through, straight = (request(url + path, "POST", body) for url in (router.url, server.url))
                assert through[0] == straight[0] == 200 and through[2] == straight[2]
                assert server.seen[-1] == server.seen[-2] == body  # nothing is asked of servers that do both


def test_bad_options_are_named(tmp_path):
    for args, expected in ((["--history-shape", "48x128"], "history_shape"), (["--history-shape", SHAPE, "--history-sample", 2], "--history-sample")):
        router = Server("router", "--worker", "http://127.0.0.1:9", *args, log=tmp_path / "bad.log")
        assert router.popen.wait(10) == 2
        assert expected in router.text() and "accepted" in router.text()
        router.stop()
