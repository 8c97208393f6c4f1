"""Kindred's router and plugin with real vLLM servers: what docs/deploy-vllm.md promises, in the order that ends with a
dead server."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import re
import struct
import subprocess
import time
import urllib.parse
from collections import Counter
from typing import Any

import msgspec
import zmq
from cluster import BINARY, MODEL, ROOT, Server, get_json, metric, post_json, request, stream, wait_until
from vllm_fleet import BLOCK, NAME, PYTHON, Fleet, counts_of, decisions, prefill_leg

TOP_K, LAYERS = 4, 6
BODY = {"model": NAME, "max_tokens": 24, "temperature": 0}


def prompts(domain: str, most: int) -> list[str]:
    rows = [json.loads(line) for line in (ROOT / "data/prompts/calibration.jsonl").read_text().splitlines()]
    return [row["prompt"] for row in rows if row["domain"] == domain][:most]


def complete(url: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    status, answer = post_json(url + "/v1/completions", {**BODY, "prompt": prompt, **fields}, timeout=180)
    assert status == 200, answer
    return answer


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def token_ids(url: str, prompt: str) -> list[int]:
    status, answer = post_json(url + "/tokenize", {"model": NAME, "prompt": prompt})
    assert status == 200, answer
    return answer["tokens"]


def fresh() -> str:
    """A cache_salt: nothing that was sent before is a prefix of what has it."""
    return os.urandom(8).hex()


def added(*parts: dict[int, list[int]]) -> dict[int, list[int]]:
    return {layer: [sum(row) for row in zip(*(part[layer] for part in parts), strict=True)] for layer in parts[0]}


# --- counts --------------------------------------------------------------------------------------


def test_counts_equal_what_the_gates_say(fleet: Fleet) -> None:
    assert fleet.prefill.rpc("kindred_watch") == {"gates": LAYERS}
    long = "\n".join(prompts("legal", 12))
    for prompt in ["A", *prompts("ja", 3), *prompts("code", 3), *prompts("de", 3), long]:
        answer, seen = fleet.counts_by_hook(prompt)
        wire = answer["kv_transfer_params"]["expert_counts"]
        assert wire["tokens"] == answer["usage"]["prompt_tokens"]
        assert wire["top_k"] == TOP_K
        assert counts_of(wire) == seen
    assert wire["tokens"] > 256, "the last prompt must take several chunks"


def test_a_cached_prefix_counts_exactly(fleet: Fleet) -> None:
    url = fleet.prefill.url
    ids = token_ids(url, "\n".join(prompts("math", 8)))
    whole = 3 * BLOCK
    assert len(ids) > 2 * whole
    salt = {"cache_salt": fresh()}
    fleet.prefill.rpc("kindred_take")
    first = counts_of(prefill_leg(url, ids[:whole], **salt)["kv_transfer_params"]["expert_counts"])
    seen_first = {int(layer): row for layer, row in fleet.prefill.rpc("kindred_take").items()}
    assert first == seen_first
    second = counts_of(prefill_leg(url, ids[: whole + 50], **salt)["kv_transfer_params"]["expert_counts"])
    seen_second = {int(layer): row for layer, row in fleet.prefill.rpc("kindred_take").items()}
    assert sum(seen_second[0]) == 50 * TOP_K, "the prefix was computed again: no hit"
    assert second == added(seen_first, seen_second)


def test_requests_that_share_batches_are_kept_apart(fleet: Fleet) -> None:
    texts = [*prompts("es", 4), *prompts("ja", 4)]
    fleet.prefill.rpc("kindred_take")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: prefill_leg(fleet.prefill.url, texts[i], cache_salt=fresh()), range(8)))
    together = {int(layer): row for layer, row in fleet.prefill.rpc("kindred_take").items()}
    each = [counts_of(answer["kv_transfer_params"]["expert_counts"]) for answer in answers]
    for answer, counts in zip(answers, each, strict=True):
        assert all(sum(row) == answer["usage"]["prompt_tokens"] * TOP_K for row in counts.values())
    assert added(*each) == together


def test_blocks_that_are_reused_count_anew(fleet: Fleet) -> None:
    ids = token_ids(fleet.prefill.url, "\n".join(prompts("legal", 24)))[:2000]
    pool_tokens = fleet.prefill_blocks * BLOCK
    for _ in range(pool_tokens // len(ids) + 1):
        complete(fleet.prefill.url, ids, max_tokens=1, cache_salt=fresh())
    answer, seen = fleet.counts_by_hook(prompts("de", 5)[4])
    assert counts_of(answer["kv_transfer_params"]["expert_counts"]) == seen


def test_selections_equal_those_of_the_embedded_worker(fleet: Fleet) -> None:
    log = fleet.folder / "embedded.log"
    worker = Server("worker", "--model", MODEL, "--threads", 1, log=log)
    try:
        worker.wait_ready()
        same = total = 0
        for prompt in [*prompts("ja", 8), *prompts("code", 8), *prompts("de", 8)]:
            status, answer = post_json(
                worker.url + "/v1/completions",
                {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_expert_counts": True},
            )
            assert status == 200, answer
            embedded = counts_of(answer["expert_counts"])
            leg = prefill_leg(fleet.prefill.url, prompt, cache_salt=fresh())
            ours = counts_of(leg["kv_transfer_params"]["expert_counts"])
            assert answer["usage"]["prompt_tokens"] == leg["usage"]["prompt_tokens"]
            for layer, row in embedded.items():  # all but the last layer
                same += sum(min(a, b) for a, b in zip(row, ours[layer], strict=True))
                total += sum(row)
    finally:
        worker.stop()
    print(f"selections equal to the embedded worker's: {same} of {total}, {100 * same / total:.2f} %")
    assert same / total >= 0.99


def kindred(*args: Any) -> str:
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_recording_makes_cohorts_and_advice(fleet: Fleet) -> None:
    """The way that docs/deploy-vllm.md describes."""
    folder = fleet.folder
    rows = [{"prompt": p, "domain": d} for d in ("ja", "code") for p in prompts(d, 8)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    recording, cohorts = folder / "activations.safetensors", folder / "cohorts.safetensors"
    record = [PYTHON, "-m", "kindred_vllm.record", "--url", fleet.prefill.url, "--max-tokens", "12"]
    record += ["--prompts", folder / "prompts.jsonl", "--output", recording]
    done = subprocess.run(record, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())
    kept = int(re.search(r": (\d+) requests", done.stdout)[1])  # type: ignore[index]
    assert kept >= 14
    kindred("fit", recording, "--workers", 2, "--output", cohorts)
    with fleet.router("--cohorts", cohorts) as router:
        for prompt in prompts("ja", 14)[12:]:
            complete(router.url, prompt, max_tokens=2)
        assert all(d["scores"] and d["fallback"] == "none" for d in decisions(router))
    # No profile is of the test model: one is given its shape, so that the recording is read.
    profile = json.loads((ROOT / "profiles/h100-qwen3-30b-a3b.json").read_text())
    profile["dims"] |= {"layers": LAYERS, "moe_layers": LAYERS, "experts": 64, "top_k": TOP_K}
    (folder / "profile.json").write_text(json.dumps(profile))
    advice = kindred(
        "simulate",
        "advise",
        recording,
        "--profile",
        folder / "profile.json",
        "--workers",
        2,
        "--batch",
        4,
        "--ranks",
        1,
    )
    assert "%" in advice


def means_of(router: Server) -> list[float | None]:
    """TPOT of each arm of the experiment, of slices that are over."""
    return [arm["means"]["tpot_s"] for arm in get_json(router.url + "/experiment")["arms"]]


def test_shadow_decisions_and_a_switchback(fleet: Fleet) -> None:
    cohorts = fleet.folder / "cohorts.safetensors"  # of the test before
    texts = [*prompts("ja", 4), *prompts("code", 4)]
    with fleet.router(
        "--decode-policy", "least-loaded", "--shadow-policy", "locality-band", "--cohorts", cohorts
    ) as router:
        for prompt in texts:
            complete(router.url, prompt, max_tokens=2)
        made = decisions(router)
        assert {d["policy"] for d in made} == {"least-loaded"}
        assert all(d["shadow_worker"] in {server.url for server in fleet.decode} for d in made)
        compared = metric(router.url, "kindred_router_shadow_decisions_total")
        assert compared == len(texts)
        assert len({d["shadow_worker"] for d in made}) == 2, "the shadow would have used both decode servers"
    arms = ["--experiment", "even: decode_policy=least-loaded", "--experiment", "near: decode_policy=locality-band"]
    slices = ["--experiment-slice-ms", 8000, "--experiment-seam-ms", 200]
    with fleet.router(*arms, *slices, "--cohorts", cohorts) as router:
        end = time.monotonic() + 180
        while not all(means_of(router)) and time.monotonic() < end:
            body = {**BODY, "prompt": texts[0], "max_tokens": 6, "stream": True}
            for _ in stream(router.url + "/v1/completions", body):
                pass
        arms_seen = get_json(router.url + "/experiment")["arms"]
        print("switchback:", [(arm["name"], arm["requests"], arm["means"]["tpot_s"]) for arm in arms_seen])
        assert [arm["name"] for arm in arms_seen] == ["even", "near"]
        assert all(means_of(router))


# --- through the router --------------------------------------------------------------------------


def test_outputs_equal_those_of_a_single_vllm(fleet: Fleet) -> None:
    with fleet.router("--decode-policy", "round-robin") as router:
        for prompt in [*prompts("ja", 2), *prompts("code", 2), *prompts("es", 2)]:
            split = complete(router.url, prompt)
            single = complete(fleet.decode[0].url, prompt, cache_salt=fresh())
            assert text_of(split) == text_of(single)
            assert split["usage"]["completion_tokens"] == single["usage"]["completion_tokens"]
            assert "expert_counts" not in json.dumps(split)
        used = {d["decode_worker"] for d in decisions(router)}
        assert used == {server.url for server in fleet.decode}
        assert {d["prefill_worker"] for d in decisions(router)} == {fleet.prefill.url}


def test_decode_is_chosen_by_signature(fleet: Fleet) -> None:
    flags = ["--refit", "--refit-min-requests", 24, "--refit-interval-ms", 500, "--refit-window-ms", 120000, "--tau", 0]
    domains = {"ja": prompts("ja", 24), "code": prompts("code", 24)}
    with fleet.router(*flags) as router:
        for pair in zip(domains["ja"][:16], domains["code"][:16], strict=True):
            for prompt in pair:
                complete(router.url, prompt, max_tokens=2)
        wait_until(lambda: get_json(router.url + "/status")["refit"]["fits"] > 0, 60, "a first fit")
        fits = get_json(router.url + "/status")["refit"]["fits"]
        wait_until(lambda: get_json(router.url + "/status")["refit"]["fits"] > fits, 60, "a fit of all of them")
        where = {}
        for domain, texts in domains.items():
            for prompt in texts[16:]:
                complete(router.url, prompt, max_tokens=2)
            made = decisions(router)[: len(texts[16:])]
            assert all(d["scores"] and d["decode_worker"] == max(d["scores"], key=d["scores"].get) for d in made)
            assert {d["fallback"] for d in made} == {"none"}
            where[domain] = Counter(d["decode_worker"] for d in made)
        print("decode servers by domain:", {domain: sorted(c.values()) for domain, c in where.items()})
        (ja, ja_times), (code, code_times) = (where[d].most_common(1)[0] for d in ("ja", "code"))
        assert ja != code
        assert ja_times + code_times >= 15  # of 16


def test_kv_events_feed_the_prefix_index(fleet: Fleet) -> None:
    with fleet.router("--prefill-policy", "kv-aware", "--kv-events", fleet.events) as router:

        def blocks() -> int:
            # A new prompt each time: what was published before the router had subscribed is lost to it.
            complete(router.url, f"{fresh()} {prompts('ja', 1)[0]}", max_tokens=2)
            return get_json(router.url + "/status")["prefixes"]["exact"]["blocks"]

        wait_until(blocks, 60, "blocks in the index")
        prompt = f"{fresh()} " + "\n".join(prompts("es", 6))
        complete(router.url, prompt, max_tokens=2)
        tokens = len(token_ids(fleet.prefill.url, prompt))
        before = metric(router.url, "kindred_router_prefix_held_tokens_total")
        complete(router.url, prompt, max_tokens=2)
        held = metric(router.url, "kindred_router_prefix_held_tokens_total") - before
        print(f"the index knew {held:.0f} of the {tokens} tokens of a prompt sent twice")
        assert held in (tokens // BLOCK * BLOCK, (tokens - 1) // BLOCK * BLOCK)
        assert decisions(router)[0]["prefill_reason"] == "held"


def subscriber(endpoint: str) -> zmq.Socket:
    """Hears the traces there: an idle engine publishes one a second."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kindred.trace")
    socket.setsockopt(zmq.RCVTIMEO, 20000)
    socket.connect(endpoint)
    socket.recv_multipart()
    return socket


def test_traces_say_how_the_engine_stands(fleet: Fleet) -> None:
    socket = subscriber(fleet.traces[0])
    ids = token_ids(fleet.prefill.url, "\n".join(prompts("legal", 24)))[:1000]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(complete, fleet.prefill.url, ids, max_tokens=1, cache_salt=fresh())
        traces = []
        while not traces or traces[-1]["running"] + traces[-1]["waiting"] > 0:
            topic, number, body = socket.recv_multipart()
            assert topic == b"kindred.trace"
            trace = msgspec.msgpack.decode(body)
            assert struct.unpack(">Q", number)[0] == trace["sequence"]
            if traces or trace["waiting"] + trace["running"] > 0:  # while it is idle it says so once a second
                traces.append(trace)
        done.result()
    socket.close()
    assert {trace["epoch"] for trace in traces} == {traces[0]["epoch"]}
    assert traces[0]["waiting"] == 1
    assert traces[0]["waiting_prefill_tokens"] == 1000
    left = [trace["remaining_prefill_tokens"] for trace in traces if trace["running"] == 1]
    print("prefill tokens left while it ran:", left)
    assert left == sorted(left, reverse=True)
    assert any(0 < tokens < 1000 for tokens in left)
    assert traces[-1]["remaining_prefill_tokens"] == 0
    assert traces[-1]["kv_tokens"] > 0


def engines(router: Server) -> dict[str, dict[str, Any]]:
    """By worker: what the router knows of its one engine."""
    return {w["url"]: w["engines"][0] for w in get_json(router.url + "/status")["workers"] if w["engines"]}


def test_the_router_decides_by_what_the_engines_say(fleet: Fleet) -> None:
    busy, idle = fleet.prefill, fleet.decode[0]
    sources = [f"{server.url}={endpoint}" for server, endpoint in zip((busy, idle), fleet.traces, strict=True)]
    flags = ["--engine-policy", "pressure", "--traces", sources[0], "--traces", sources[1]]
    with fleet.router_over(["--worker", busy.url, "--worker", idle.url], *flags) as router:
        wait_until(
            lambda: len(engines(router)) == 2 and all(e["pushed"] for e in engines(router).values()), 30, "both engines"
        )
        before = {url: engine["sequence"] for url, engine in engines(router).items()}
        wait_until(lambda: all(e["sequence"] >= before[u] + 2 for u, e in engines(router).items()), 20, "idle engines")
        assert {e["trace"] for e in engines(router).values()} == {"fresh"}
        # Of this long prompt the router knows only by the traces: it goes past it.
        ids = token_ids(busy.url, "\n".join(prompts("legal", 48)))[:3800]
        text = prompts("de", 1)[0]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            past = pool.submit(complete, busy.url, ids, max_tokens=1, cache_salt=fresh())
            wait_until(lambda: engines(router)[busy.url].get("remaining_prefill_tokens", 0) > 1000, 30, "a busy engine")
            assert engines(router)[busy.url]["in_flight"] == 0
            answers = [complete(router.url, text, cache_salt=fresh()) for _ in range(2)]
            made = decisions(router)[:2]
            past.result()
        assert [(d["decode_worker"], d["reason"]) for d in made] == [(idle.url, "pressure")] * 2
        assert {text_of(answer) for answer in answers} == {text_of(complete(idle.url, text, cache_salt=fresh()))}
        assert metric(router.url, "kindred_router_traces_total") > 4
        assert metric(router.url, "kindred_router_trace_errors_total") == 0


def test_traces_name_the_requests_that_the_router_has_sent(fleet: Fleet) -> None:
    flags = ["--engine-policy", "pressure", "--traces", f"{fleet.prefill.url}={fleet.traces[0]}"]
    socket = subscriber(fleet.traces[0])
    known = msgspec.msgpack.decode(socket.recv_multipart()[2])["received"]
    with fleet.router("--decode-policy", "least-loaded", *flags) as router:
        # A poll makes the engine known, too; names go to those that push.
        wait_until(lambda: engines(router).get(fleet.prefill.url, {}).get("pushed"), 30, "a first trace")
        own = {"vllm_xargs": {"note": "of the client"}}
        for fields in ({}, own):
            assert text_of(complete(router.url, prompts("es", 1)[0], max_tokens=4, **fields))
        assert {d["prefill_worker"] for d in decisions(router)[:2]} == {fleet.prefill.url}
        sent_s = time.time()
        wait_until(lambda: engines(router)[fleet.prefill.url]["compensation_tokens"] == 0, 10, "nothing unseen")
    traces = [msgspec.msgpack.decode(socket.recv_multipart()[2])]
    while traces[-1]["running"] + traces[-1]["waiting"] > 0 or traces[-1]["time_s"] < sent_s:
        traces.append(msgspec.msgpack.decode(socket.recv_multipart()[2]))
    socket.close()
    named = traces[-1]["received"]
    assert named[: len(known)] == known
    assert len(set(named)) == len(known) + 2


# --- the engine's own queue ----------------------------------------------------------------------


def order_of(fleet: Fleet, url: str, late: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """The names of `late` requests in the order of their answers: sent one after the other while a prompt of many
    chunks keeps the prefill server busy."""
    ids = token_ids(fleet.prefill.url, "\n".join(prompts("legal", 48)))[:3800]
    done: list[str] = []
    socket = subscriber(fleet.traces[0])  # which says of a request when it comes; /metrics only after a step

    def wait_for(field: str, count: int) -> None:
        end = time.monotonic() + 30
        while msgspec.msgpack.decode(socket.recv_multipart()[2])[field] != count:
            assert time.monotonic() < end, f"never {count} {field}"

    def ask(name: str, text: str, fields: dict[str, Any]) -> None:
        complete(url, text, max_tokens=1, cache_salt=fresh(), **fields)
        done.append(name)

    with concurrent.futures.ThreadPoolExecutor(1 + len(late)) as pool:
        first = pool.submit(complete, fleet.prefill.url, ids, max_tokens=1, cache_salt=fresh())
        wait_for("running", 1)
        jobs = []
        for i, row in enumerate(late, 1):
            jobs.append(pool.submit(ask, *row))
            wait_for("waiting", i)
        assert not first.done()
        for job in [first, *jobs]:
            job.result()
    socket.close()
    return done


def test_lower_priorities_pass_ahead_inside_the_engine(fleet: Fleet) -> None:
    text = "\n".join(prompts("legal", 10))  # more than a step's tokens: who is behind must wait
    late = [("later", text, {"priority": 10}), ("sooner", text, {"priority": 1})]
    assert order_of(fleet, fleet.prefill.url, late) == ["sooner", "later"]


def test_the_router_has_short_prompts_pass_ahead(fleet: Fleet) -> None:
    flags = ["--vllm-priority", "on", "--priority-ms-per-token", 100]
    with fleet.router_over(["--worker", fleet.prefill.url], *flags) as router:
        late = [("long", "\n".join(prompts("legal", 14)), {}), ("short", "\n".join(prompts("legal", 2)), {})]
        assert order_of(fleet, router.url, late) == ["short", "long"]


def test_a_full_queue_leads_to_another_server(fleet: Fleet) -> None:
    d0, d1 = fleet.decode
    body = {**BODY, "prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    held = [stream(d1.url + "/v1/completions", body) for _ in range(2)]
    for answer in held:
        next(answer)
    try:
        status, answer = post_json(d1.url + "/v1/completions", {**BODY, "prompt": "x", "max_tokens": 1})
        assert status == 503, answer
        for router_flags in (["--prefill", fleet.prefill.url, "--decode", d0.url, "--decode", d1.url],
                             ["--worker", d0.url, "--worker", d1.url]):  # fmt: skip
            with fleet.router_over(router_flags, "--decode-policy", "round-robin") as router:
                for prompt in prompts("es", 4):
                    assert text_of(complete(router.url, prompt, max_tokens=4))
                assert metric(router.url, "kindred_router_retries_total") >= 1
    finally:
        for answer in held:
            answer.close()
    wait_until(lambda: d1.metric("vllm:num_requests_running") == 0, 30, "the streams' end")


# --- clients and servers that leave --------------------------------------------------------------


def test_no_client_reaches_an_engine_with_transfer_parameters(fleet: Fleet) -> None:
    with fleet.router() as router:
        servers = [fleet.prefill, *fleet.decode]
        before = [server.metric("vllm:request_success_total") for server in servers]
        for params in ({"do_remote_prefill": True}, {"do_remote_decode": True, "remote_host": "10.0.0.1"}):
            body = {"model": NAME, "prompt": "x", "max_tokens": 2, "kv_transfer_params": params}
            status, answer = post_json(router.url + "/v1/completions", body)
            assert status == 400, answer
            assert "kv_transfer_params" in answer["error"]["message"]
        assert [server.metric("vllm:request_success_total") for server in servers] == before
        assert text_of(complete(router.url, prompts("de", 1)[0]))


def test_a_client_that_leaves_frees_its_kv(fleet: Fleet) -> None:
    servers = [fleet.prefill, *fleet.decode]

    def idle() -> bool:
        return all(server.metric("vllm:num_requests_running") == 0 for server in servers) and all(
            server.metric("vllm:kv_cache_usage_perc") == 0 for server in servers
        )

    wait_until(idle, 90, "leases of earlier tests to end")
    with fleet.router() as router:
        parts = urllib.parse.urlsplit(router.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
        body = {"model": NAME, "prompt": prompts("es", 1)[0], "max_tokens": 3000, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        assert sum(server.metric("vllm:num_requests_running") for server in fleet.decode) == 1
        connection.sock.shutdown(2) if connection.sock else response.close()
        response.close()
        connection.close()
        start = time.monotonic()
        wait_until(idle, 60, "no request running and no KV held on any server")
        print(f"KV free {time.monotonic() - start:.1f} s after the client had left")


def test_a_decode_server_that_dies(fleet: Fleet) -> None:
    with fleet.router("--decode-policy", "round-robin") as router:
        complete(router.url, prompts("ja", 1)[0])
        fleet.decode[1].kill()
        for prompt in prompts("ja", 6):
            assert text_of(complete(router.url, prompt)) == text_of(
                complete(fleet.decode[0].url, prompt, cache_salt=fresh())
            )
        health = {w["url"]: w["health"] for w in get_json(router.url + "/status")["workers"]}
        print("health after the kill:", health)
        assert health[fleet.decode[1].url] != "up"
        assert health[fleet.decode[0].url] == "up"
        assert request(router.url + "/ready")[0] == 200
