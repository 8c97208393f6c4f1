"""One worker with several engines: outputs, pinning, what it says of their load, and queues under --kv-admission."""

import concurrent.futures

import pytest

from cluster import MODEL, Server, chat, get_json, metric, post_json, request, wait_until

PROMPTS = [chat(f"Tell me {n} facts about the number {n}.", max_tokens=10 + n, seed=n, temperature=n % 3 / 2, cache_prompt=False) for n in range(8)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("data-parallel")
    common = ["worker", "--model", MODEL, "--threads", 1]
    two = Server(*common, "--data-parallel-size", 2, "--traces-port", 0, "--queue-policy", "sjf-aging", log=tmp / "two.log")
    tight = Server(
        *common, "--data-parallel-size", 2, "--kv-admission", "optimistic", "--kv-tokens", 320, "--prefix-cache=false", log=tmp / "tight.log"
    )
    one = Server(*common, log=tmp / "one.log")
    try:
        yield tuple(worker.wait_ready() for worker in (one, two, tight))
    finally:
        for worker in (one, two, tight):
            worker.stop()


def complete(worker, body, headers=None):
    status, answer = post_json(worker.url + "/v1/chat/completions", body, headers)
    assert status == 200, answer
    return answer["choices"]


def together(worker, bodies):
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: complete(worker, body), bodies))


def test_outputs_equal_those_of_one_engine(workers):
    # One at a time: kernels may round by the size of a batch.
    one, two, _ = workers
    for body in PROMPTS:
        assert complete(two, body) == complete(one, body)
    assert all(metric(two.url, "vllm:generation_tokens_total", engine=engine) > 0 for engine in (0, 1))


def test_requests_survive_preemption(workers):
    tight = workers[2]
    bodies = [chat(f"Count to {n}.", max_tokens=120, ignore_eos=True, seed=n, temperature=1) for n in range(10)]
    for choices in together(tight, bodies):
        assert choices[0]["finish_reason"] == "length"
    assert metric(tight.url, "vllm:generation_tokens_total") == 1200
    assert metric(tight.url, "vllm:num_preemptions_total") > 0
    assert metric(tight.url, "kindred_recomputed_tokens_total") > 0


def test_pinned(workers):
    two = workers[1]
    before = metric(two.url, "vllm:generation_tokens_total", engine=0)
    for body in PROMPTS[:3]:
        complete(two, body, {"X-data-parallel-rank": "1"})
    assert metric(two.url, "vllm:generation_tokens_total", engine=0) == before


@pytest.mark.parametrize("header, value", [("X-data-parallel-rank", "2"), ("X-data-parallel-rank", "one"), ("X-Kindred-Dispatch", "7")])
def test_bad_headers_are_named(workers, header, value):
    status, answer = post_json(workers[1].url + "/v1/chat/completions", chat(), {header: value})
    assert status == 400 and header in answer["error"]["message"], answer


def test_loads_and_what_models_says(workers):
    two = workers[1]

    def loads():
        return get_json(two.url + "/v1/loads")["loads"]

    assert [load["dp_rank"] for load in loads()] == [0, 1]
    wait_until(lambda: all(load["num_running_reqs"] == load["num_waiting_reqs"] == 0 for load in loads()), 10, "idle")
    assert all(load["kindred"]["remaining_prefill_tokens"] == 0 for load in loads())
    kindred = get_json(two.url + "/v1/models")["data"][0]["kindred"]
    assert kindred["data_parallel_size"] == 2 and kindred["traces"].startswith("tcp://127.0.0.1:")
    assert request(two.url + "/v1/loads?dp_rank=5")[0] == 400
