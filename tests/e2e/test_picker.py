"""`kindred picker`, spoken to as Envoy speaks."""

import concurrent.futures
import contextlib
import json
import signal
import subprocess

import grpc
import pytest

from cluster import chat, get_json, metric, wait_until
from picker_client import BUFFERED, NONE, STREAMED, Stream, health, headers_of, mock_fleet, pick_of, picker

BODY = json.dumps(chat(model="simulated", max_tokens=20)).encode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with mock_fleet(tmp_path_factory.mktemp("fleet"), "2B") as (urls, _):
        yield urls


@pytest.fixture(scope="module")
def running(tmp_path_factory, whole):
    with picker(tmp_path_factory.mktemp("picker"), whole, "--decode-policy", "least-loaded") as (process, address):
        with grpc.insecure_channel(address) as channel:
            yield process, channel, address


def endpoints(urls, role="worker"):
    return [url.removeprefix("http://") for named, url in urls if named == role]


def in_flight(process):
    return {w["url"].removeprefix("http://"): w["in_flight"] for w in get_json(process.url + "/status")["workers"]}


def wait_idle(process):
    wait_until(lambda: sum(in_flight(process).values()) == 0 and get_json(process.url + "/status")["requests_in_flight"] == 0,
               10, "no load left")


def refusal(stream):
    response = stream.receive()
    assert response.WhichOneof("response") == "immediate_response", response
    answer = response.immediate_response
    return answer.status.code, headers_of(answer.headers), json.loads(answer.body)["error"]


def test_a_request_in_pieces_from_its_head_to_the_end_of_its_answer(running, whole):
    process, channel, _ = running
    before = metric(process.url, "kindred_router_requests_total", outcome="ok")
    with Stream(channel) as stream:
        stream.head(headers={"x-kindred-leg": "decode", "x-prefiller-host-port": "10.0.0.1:1", "x-request-id": "mine"})
        stream.body(BODY[:10], end_of_stream=False)
        stream.body(BODY[10:30], end_of_stream=False)
        stream.body(BODY[30:])
        response = stream.receive()
        assert response.WhichOneof("response") == "request_headers"
        endpoint, headers = pick_of(response)
        assert endpoint in endpoints(whole)
        assert headers["content-length"] == str(len(BODY)) and headers["x-request-id"] == "mine"
        # What a client must not say.
        assert set(response.request_headers.response.header_mutation.remove_headers) == {"x-kindred-leg", "x-prefiller-host-port"}
        response = stream.receive()
        back = response.request_body.response.body_mutation.streamed_response
        assert back.body == BODY and back.end_of_stream
        assert in_flight(process)[endpoint] == 1
        stream.answer(served=endpoint)
        assert stream.receive().WhichOneof("response") == "response_headers"
        for data, ends in ((b"data: 1\n\n", False), (b"data: 2\n\n", False), (b"", True)):
            stream.answer_body(data, ends)
            back = stream.receive().response_body.response.body_mutation.streamed_response
            assert (back.body, back.end_of_stream) == (data, ends)
            assert in_flight(process)[endpoint] == (0 if ends else 1)
    wait_idle(process)
    assert metric(process.url, "kindred_router_requests_total", outcome="ok") == before + 1
    last = get_json(process.url + "/status?decisions=1")["decisions"][0]
    assert last["request_id"] == "mine" and last["policy"] == "least-loaded"


def test_load_is_balanced_over_open_streams(running, whole):
    process, channel, _ = running
    with contextlib.ExitStack() as open_streams:
        picks = []
        for _ in range(4):
            stream = open_streams.enter_context(Stream(channel))
            stream.head()
            stream.body(BODY)
            picks.append(stream.picked()[0])
        assert sorted(picks) == sorted(endpoints(whole) * 2)
    wait_idle(process)


def test_a_long_body_comes_back_in_pieces_that_envoy_takes(running):
    process, channel, _ = running
    body = json.dumps(chat(prompt="a" * 300_000, model="simulated")).encode()
    with Stream(channel) as stream:
        stream.head()
        for at in range(0, len(body), 60_000):
            stream.body(body[at:at + 60_000], end_of_stream=at + 60_000 >= len(body))
        stream.picked()
        pieces = []
        while not pieces or not pieces[-1].end_of_stream:
            pieces.append(stream.receive().request_body.response.body_mutation.streamed_response)
        assert b"".join(p.body for p in pieces) == body
        assert max(len(p.body) for p in pieces) <= 64 * 1024
    wait_idle(process)


def test_subsets_bind(running, whole):
    _, channel, _ = running
    for only in endpoints(whole):
        with Stream(channel) as stream:
            stream.head(subset=[only, "10.9.9.9:1"])
            stream.body(BODY)
            assert stream.picked()[0] == only
    for nobody in ([], ["10.9.9.9:1"]):
        with Stream(channel) as stream:
            stream.head(subset=nobody)
            stream.body(BODY)
            status, headers, error = refusal(stream)
            assert (status, error["code"], headers["retry-after"]) == (503, "no_worker_available", "1")


@pytest.mark.parametrize("body,status,field", [
    (b"{not json", 400, None),
    (json.dumps(chat(model="nobody-has-it")).encode(), 404, "model"),
    (json.dumps(chat(model="simulated", kv_transfer_params={"do_remote_prefill": True})).encode(), 400, "kv_transfer_params"),
])
def test_what_the_router_would_refuse_is_refused(running, body, status, field):
    process, channel, _ = running
    with Stream(channel) as stream:
        stream.head()
        stream.body(body)
        code, headers, error = refusal(stream)
        assert code == status and error["param"] == field and headers["content-type"] == "application/json"
    wait_idle(process)


def test_other_paths_and_modes(running, whole):
    process, channel, _ = running
    with Stream(channel) as stream:
        stream.head(path="/v1/models", method="GET", end_of_stream=True)
        assert stream.picked()[0] in endpoints(whole)
    with Stream(channel) as stream:  # a proxy that does not tell its mode is taken by the protocol's word
        stream.head(request_mode=None)
        stream.body(BODY)
        assert stream.picked()[0] in endpoints(whole)
    with Stream(channel) as stream:
        stream.head(request_mode=BUFFERED)
        assert not stream.receive().request_headers.response.header_mutation.set_headers
        stream.body(BODY)
        response = stream.receive()
        assert response.WhichOneof("response") == "request_body"
        assert pick_of(response)[0] in endpoints(whole)
    for mode in (STREAMED, NONE):
        with Stream(channel) as stream:
            stream.head(request_mode=mode)
            assert stream.picked()[0] in endpoints(whole)
    wait_idle(process)


@pytest.mark.parametrize("when", ["body", "picked", "answered"])
def test_a_stream_that_is_cut_leaves_no_load(running, when):
    process, channel, _ = running
    ended = {"body": "cancelled", "picked": "cancelled", "answered": "cut"}[when]
    before = metric(process.url, "kindred_router_requests_total", outcome=ended)
    stream = Stream(channel)
    stream.head()
    stream.body(BODY, end_of_stream=when != "body")
    if when != "body":
        stream.picked()
        assert sum(in_flight(process).values()) == 1
    wait_until(lambda: get_json(process.url + "/status")["requests_in_flight"] == 1, 10, "it has come")
    if when == "answered":
        stream.receive()
        stream.answer()
        stream.receive()
    stream.call.cancel()
    stream.end()
    wait_idle(process)
    wait_until(lambda: metric(process.url, "kindred_router_requests_total", outcome=ended) == before + 1, 10, ended)


def test_who_served_it_is_charged_for_it(running, whole):
    process, channel, _ = running
    with Stream(channel) as stream:
        stream.head()
        stream.body(BODY)
        picked = stream.picked()[0]
        stream.receive()
        other = next(e for e in endpoints(whole) if e != picked)
        stream.answer(served=other)
        stream.receive()
        assert in_flight(process) == {picked: 0, other: 1}
    wait_idle(process)


def test_impossible_messages_end_the_stream_with_an_error(running):
    process, channel, _ = running
    stream = Stream(channel)
    stream.body(BODY)
    with pytest.raises(grpc.RpcError) as caught:
        stream.receive()
    assert caught.value.code() == grpc.StatusCode.ABORTED
    stream.end()
    wait_idle(process)


def test_more_than_there_is_room_for_is_429(tmp_path, whole):
    with picker(tmp_path, whole, "--max-inflight", 1, "--queue", 0) as (process, address):
        with grpc.insecure_channel(address) as channel:
            with Stream(channel) as first:
                first.head()
                first.body(BODY)
                first.picked()
                with Stream(channel) as second:
                    second.head()
                    status, headers, error = refusal(second)
                    assert (status, headers["retry-after"], error["code"]) == (429, "1", "router_busy")
            wait_idle(process)
            with Stream(channel) as third:  # the place is free again
                third.head()
                third.body(BODY)
                third.picked()


def test_streams_are_bounded(tmp_path, whole):
    with picker(tmp_path, whole, "--picker-streams", 1) as (_, address), grpc.insecure_channel(address) as channel:
        with Stream(channel) as first:
            first.head()
            first.body(BODY)
            first.picked()
            with Stream(channel) as second:
                second.head()
                assert refusal(second)[0] == 429


def aborted(stream):
    with pytest.raises(grpc.RpcError) as caught:
        while True:
            stream.receive()
    stream.end()
    return caught.value.code() == grpc.StatusCode.ABORTED


def test_a_batch_request_gives_its_place_to_an_interactive_one(tmp_path, whole):
    with picker(tmp_path, whole, "--max-inflight", 1, "--batch-headroom-percent", 0) as (process, address):
        with grpc.insecure_channel(address) as channel:
            batch = Stream(channel)
            batch.head(headers={"x-kindred-lane": "batch"})
            batch.body(BODY)
            batch.picked()
            with Stream(channel) as stream:
                stream.head()
                stream.body(BODY)
                stream.picked()
                assert aborted(batch)
                assert sum(in_flight(process).values()) == 1
            wait_idle(process)


def test_a_stream_that_never_ends_is_ended(tmp_path, whole):
    with picker(tmp_path, whole, "--picker-stream-ms", 1000) as (process, address), grpc.insecure_channel(address) as channel:
        stream = Stream(channel)
        stream.head()
        stream.body(BODY)
        stream.picked()
        assert aborted(stream)
        wait_idle(process)


def test_tls(tmp_path, whole):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
                    "-subj", "/CN=picker", "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
                   check=True, capture_output=True)
    with picker(tmp_path, whole, "--picker-tls-cert", cert, "--picker-tls-key", key) as (_, address):
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(address, trusted) as channel, Stream(channel) as stream:
            stream.head()
            stream.body(BODY)
            assert stream.picked()[0] in endpoints(whole)
        with pytest.raises(grpc.RpcError):
            health(address, "liveness")  # in clear


def test_health_and_the_end(tmp_path):
    with mock_fleet(tmp_path, "1B") as (urls, serve), picker(tmp_path, urls) as (process, address):
        ready = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [health(address, s) for s in ("", "liveness", *ready)] == [1, 1, 1, 1]
        with pytest.raises(grpc.RpcError) as caught:
            health(address, "nobody")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        with grpc.insecure_channel(address) as channel:
            with Stream(channel) as stream:
                stream.head()
                stream.body(BODY)
                stream.picked()
                stream.receive()
                # Streams that are open may end.
                process.popen.send_signal(signal.SIGTERM)
                wait_until(lambda: "no new requests" in process.text(), 10, "draining")
                stream.answer()
                stream.receive()
                stream.answer_body(b"", end_of_stream=True)
                stream.receive()
            assert process.popen.wait(20) == 0, process.text()
        with picker(tmp_path, urls) as (process, address):
            serve.stop()
            wait_until(lambda: health(address, "readiness") == 2, 10, "not serving without workers")
            assert health(address, "liveness") == 1


def test_prefill_is_named_for_the_sidecar(tmp_path):
    with mock_fleet(tmp_path, "1P2D", "vllm") as (urls, _), picker(tmp_path, urls) as (process, address):
        with grpc.insecure_channel(address) as channel, Stream(channel) as stream:
            stream.head()
            stream.body(BODY)
            endpoint, headers = stream.picked()
            assert endpoint in endpoints(urls, "decode")
            assert headers["x-prefiller-host-port"] in endpoints(urls, "prefill")
            stream.receive()
            assert in_flight(process)[headers["x-prefiller-host-port"]] == 1
            stream.answer()  # the prompt has been run
            stream.receive()
            assert in_flight(process)[headers["x-prefiller-host-port"]] == 0
            assert in_flight(process)[endpoint] == 1
        wait_idle(process)


def test_aliases_change_the_body_and_its_length(tmp_path, whole):
    with picker(tmp_path, whole, "--model-alias", "m=simulated") as (_, address), grpc.insecure_channel(address) as channel:
        with Stream(channel) as stream:
            stream.head()
            stream.body(json.dumps(chat(model="m")).encode())
            _, headers = stream.picked()
            back = stream.receive().request_body.response.body_mutation.streamed_response.body
            assert json.loads(back)["model"] == "simulated" and headers["content-length"] == str(len(back))


def test_many_at_once_leave_nothing(running):
    process, channel, _ = running

    def one(number):
        stream = Stream(channel)
        stream.head()
        stream.body(BODY)
        stream.picked()
        stream.receive()
        if number % 3 == 0:
            stream.call.cancel()
            return stream.end()
        stream.answer()
        stream.receive()
        stream.answer_body(b"x", end_of_stream=number % 3 == 1)
        stream.receive()
        stream.end()
        return list(stream.call)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(120)))
    wait_idle(process)
