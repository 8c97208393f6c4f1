"""Cohorts fitted from live traffic, and decode workers that join and leave while requests go on."""

import threading

import pytest

from cluster import MODEL, Cluster, Server, chat, get_json, metric, post_json, request, wait_until

CHAT = "/v1/chat/completions"
PROMPTS = [
    "def fibonacci(n):",
    "Wie funktioniert ein Dateisystem?",
    "Solve 3x + 7 = 22 for x.",
    "Write a short story about the sea.",
    "Explique la photosynthèse en deux phrases.",
    "SELECT name FROM users WHERE",
]


@pytest.fixture
def cluster(tmp_path):
    args = ("--refit", "--refit-interval-ms", 200, "--refit-window-ms", 60_000, "--refit-min-requests", 8)
    with Cluster(tmp_path, decode=2, router_args=(*args, "--refit-grace-ms", 300, "--manage-workers")) as running:
        yield running


def send(cluster, count):
    for i in range(count):
        status, answer = post_json(cluster.url + CHAT, chat(f"{PROMPTS[i % len(PROMPTS)]} {i}", max_tokens=8))
        assert status == 200, answer


def status_of(cluster, url):
    return next((w for w in get_json(cluster.url + "/status")["workers"] if w["url"] == url), None)


def test_cohorts_come_from_traffic_and_follow_the_fleet(cluster, tmp_path):
    assert get_json(cluster.url + "/status")["cohorts"] is None
    send(cluster, 12)
    wait_until(lambda: get_json(cluster.url + "/status")["refit"]["fits"] > 0, 10, "a first fit")
    status = get_json(cluster.url + "/status")
    assert status["cohorts"]["count"] == 2
    assert sorted(w["cohort"] for w in status["workers"] if w["role"] == "decode") == [0, 1]
    send(cluster, 4)
    last = get_json(cluster.url + "/status?decisions=4")["decisions"]
    assert all(d["reason"] == "band" and 0 < d["similarity"] <= 1.001 for d in last), last

    # One more, while requests go on.
    errors = []
    stop = threading.Event()

    def load():
        while not stop.is_set():
            try:
                send(cluster, 1)
            except Exception as error:  # noqa: BLE001, whatever it is, it is a failed request
                errors.append(error)

    client = threading.Thread(target=load)
    client.start()
    new = Server(
        "worker", "--role", "decode", "--model", MODEL, "--threads", 1, "--peer", cluster.prefill[0].url,
        log=tmp_path / "new.log",
    )
    try:
        new.wait_ready()
        code, _, body = request(cluster.url + "/workers", "POST", {"url": new.url, "role": "decode"})
        assert code == 201, body
        wait_until(lambda: (status_of(cluster, new.url) or {}).get("cohort") == 2, 20, "a cohort for the newcomer")
        status = get_json(cluster.url + "/status")
        assert sorted(w["cohort"] for w in status["workers"] if w["role"] == "decode") == [0, 1, 2]
        wait_until(lambda: metric(new.url, "kindred_decode_steps_total") > 0, 30, "work for the newcomer")

        code, _, body = request(cluster.url + f"/workers?url={new.url}", "DELETE")
        assert code == 200, body
        wait_until(lambda: status_of(cluster, new.url) is None, 20, "the newcomer drained")
        wait_until(lambda: get_json(cluster.url + "/status")["refit"]["merges"] > 0, 10, "its cohort given up")
        assert get_json(cluster.url + "/status")["cohorts"]["count"] == 2
    finally:
        stop.set()
        client.join()
        new.stop()
    assert not errors
    cluster.wait_idle()
