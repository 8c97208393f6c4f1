"""Disaggregation and routing change where tokens are made, never which."""

import array
import base64
import concurrent.futures
import json

import pytest

from cluster import chat, get_json, metric, post_json, request, stream

JAPANESE = "日本の首都はどこですか。理由も説明してください。"


def complete(url, body, path="/v1/chat/completions"):
    status, answer = post_json(url + path, body)
    assert status == 200, answer
    return answer


def fresh(cluster):
    """Same KV layout on both sides: a cached prefix changes the shape of the batches, and with it rounding."""
    for worker in (*cluster.prefill, *cluster.both):
        assert request(worker.url + "/reset_prefix_cache", "POST", b"{}")[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"repetition_penalty": 1.3, "logit_bias": {"300": 2, "301": -100}},
        {"n": 3, "temperature": 1, "seed": 5},
        {"max_tokens": 1},
        {"ignore_eos": True, "min_tokens": 20, "max_tokens": 60},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"stop": ["e", "the "]},
        {"messages": [{"role": "user", "content": JAPANESE}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * 1500}]},
    ],
    ids=lambda fields: ",".join(fields) or "greedy",
)
def test_equals_a_single_worker(cluster, fields):
    fresh(cluster)
    body = chat(**fields)
    alone = complete(cluster.both[0].url, body)
    routed = complete(cluster.url, body)
    assert routed["choices"] == alone["choices"]
    assert routed["usage"] == alone["usage"]


def test_a_prompt_of_one_token(cluster):
    fresh(cluster)
    body = {"prompt": [40], "max_tokens": 12, "temperature": 0}
    assert complete(cluster.url, body, "/v1/completions")["choices"] == complete(cluster.both[0].url, body, "/v1/completions")["choices"]


def test_a_prompt_up_to_the_context_limit(cluster):
    fresh(cluster)
    limit = get_json(cluster.url + "/v1/models")["data"][0]["max_model_len"]
    body = {"prompt": [40 + i % 900 for i in range(limit - 3)], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    alone, routed = (complete(url, body, "/v1/completions") for url in (cluster.both[0].url, cluster.url))
    assert routed["choices"] == alone["choices"]
    assert routed["usage"] == {**alone["usage"], "completion_tokens": 3}


@pytest.mark.parametrize("cut", range(1, 12))
def test_stop_strings_that_straddle_the_handoff(cluster, cut):
    fresh(cluster)
    text = complete(cluster.both[0].url, chat(max_tokens=12))["choices"][0]["message"]["content"]
    assert len(text) > 12
    body = chat(stop=[text[cut - 1 : cut + 3]])
    alone, routed = complete(cluster.both[0].url, body), complete(cluster.url, body)
    assert routed["choices"] == alone["choices"]
    assert routed["choices"][0]["message"]["content"] == text[: text.index(body["stop"][0])]


def test_stream_equals_whole_and_ends_once(cluster):
    fresh(cluster)
    whole = complete(cluster.url, chat(prompt=JAPANESE))
    fresh(cluster)
    events = list(stream(cluster.url + "/v1/chat/completions", chat(prompt=JAPANESE, stream=True)))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]


def test_many_at_once_all_finish_and_decode_workers_evaluate_no_prompt(cluster):
    bodies = [chat(prompt=f"Question {i}: what is {i} + {i}?", stream=bool(i % 2)) for i in range(48)]

    def run(body):
        if body["stream"]:
            return list(stream(cluster.url + "/v1/chat/completions", body))[-1] == "[DONE]"
        return bool(complete(cluster.url, body)["choices"])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(run, bodies))
    for worker in cluster.decode:
        assert metric(worker.url, "kindred_prompt_tokens_evaluated_total") == 0
        assert metric(worker.url, "vllm:generation_tokens_total") > 0
    cluster.wait_idle()


def test_expert_counts_reach_only_who_asks(cluster):
    answer = complete(cluster.url, chat(return_expert_counts=True))
    counts = answer["expert_counts"]
    assert counts["tokens"] == answer["usage"]["prompt_tokens"]
    assert answer["decode_expert_counts"]["tokens"] == answer["usage"]["completion_tokens"] - 1
    assert "expert_counts" not in complete(cluster.url, chat())
    assert "expert_counts" not in "".join(stream(cluster.url + "/v1/chat/completions", chat(stream=True)))


def test_counts_are_exact_under_prefix_hits(cluster):
    """Counts of cached blocks plus counts of the rest equal a cold run's, except where a gate's tie fell the other way."""
    worker = cluster.both[0].url
    fresh(cluster)
    prefix = "The sea is wide and deep. " * 12
    complete(worker, chat(prompt=prefix))
    for tail in ("", "What lives in it?", "Why is it salty, and since when?"):
        body = chat(prompt=prefix + tail, return_expert_counts=True)
        warm = complete(worker, body)
        cold = complete(worker, {**body, "cache_prompt": False})
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["expert_counts"]["tokens"] == cold["expert_counts"]["tokens"] == warm["usage"]["prompt_tokens"]
        flips = sum(abs(a - b) for a, b in zip(cells(warm), cells(cold), strict=True)) // 2
        selections = sum(cells(cold))
        print(f"{flips} of {selections} gate selections differ from a cold run")
        assert flips <= selections // 200


def cells(answer):
    return array.array("H", base64.b64decode(answer["expert_counts"]["data"]))
