"""The tools around the cluster: record, fit, status, model, help."""

import json
import subprocess

import pytest

from cluster import ACTIVATIONS, BINARY, MODEL, ROOT, Server, chat, get_json, metric, post_json, wait_until

COMMANDS = ["worker", "router", "demo", "record", "fit", "bench", "status", "model"]


def run(*args, timeout=120):
    return subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    done = run(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: kindred {command}")


def test_unknown_command_suggests():
    done = run("ruoter")
    assert done.returncode == 2
    assert "'router'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option_names_the_nearest(command):
    done = run(command, "--no-such-option-at-all")
    assert done.returncode == 2
    assert "--no-such-option-at-all" in done.stderr


def test_record_fit_route(cluster, tmp_path):
    """What a newcomer does with a model of their own."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.loads(line) for line in (ROOT / "data/prompts/calibration.jsonl").read_text().splitlines()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines[:36]))
    activations, cohorts = tmp_path / "a.safetensors", tmp_path / "c.safetensors"
    recorded = run("record", "--url", cluster.both[0].url, "--prompts", prompts, "--output", activations, "--max-tokens", 16)
    assert recorded.returncode == 0, recorded.stderr
    fitted = run("fit", activations, "--workers", 2, "--output", cohorts, "--json")
    assert fitted.returncode == 0, fitted.stderr
    assert json.loads(fitted.stdout)

    router = cluster.start_router("--decode-policy", "locality-band", "--cohorts", cohorts, name="own-cohorts")
    try:
        for line in lines[40:50]:
            assert post_json(router.url + "/v1/chat/completions", chat(prompt=line["prompt"]))[0] == 200
        status = get_json(router.url + "/status?decisions=10")
        assert len(status["decisions"]) == 10
        assert all(d["policy"] == "locality-band" and d["scores"] and d["fallback"] == "none" for d in status["decisions"])
        shown = run("status", "--url", router.url)
        assert shown.returncode == 0
        assert "locality-band" in shown.stdout and f"127.0.0.1:{cluster.decode[0].port}" in shown.stdout
    finally:
        router.stop()


def test_record_goes_on_where_it_stopped(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about the number {i}.", "domain": "n"}) + "\n" for i in range(40)))
    output = tmp_path / "a.safetensors"
    command = ("record", "--prompts", prompts, "--output", output, "--max-tokens", 16, "--concurrency", 2)
    worker = Server("worker", "--model", MODEL, "--threads", 1, log=tmp_path / "w.log").wait_ready()
    recorder = subprocess.Popen([BINARY, *map(str, command), "--url", worker.url], stderr=subprocess.DEVNULL)
    wait_until(lambda: metric(worker.url, "vllm:request_success_total") >= 3, 30, "three prompts done")
    worker.kill()
    assert recorder.wait(30) == 1
    part = tmp_path / "a.safetensors.part"
    kept = len(part.read_text().splitlines()) - 1
    assert 2 <= kept < 40
    assert not output.exists()

    worker = Server("worker", "--model", MODEL, "--threads", 1, log=tmp_path / "w2.log").wait_ready()
    try:
        done = run(*command, "--url", worker.url)
        assert done.returncode == 0, done.stderr
        assert f"{kept} of 40" in done.stderr
        assert metric(worker.url, "vllm:request_success_total") == 40 - kept
        assert output.exists() and not part.exists()
    finally:
        worker.stop()


def test_fit_errors_name_what_is_wrong(tmp_path):
    out = tmp_path / "c.safetensors"
    assert "217" in run("fit", ACTIVATIONS, "--workers", 217, "--output", out).stderr
    assert "/no/such" in run("fit", "/no/such", "--workers", 2, "--output", out).stderr
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(ACTIVATIONS.read_bytes()[:5000])
    assert "cut.safetensors" in run("fit", cut, "--workers", 2, "--output", out).stderr
    assert "workers" in run("fit", ACTIVATIONS, "--workers", 0, "--output", out).stderr
    assert not out.exists()


def test_model_info():
    info = json.loads(run("model", "info", MODEL, "--json").stdout)
    assert info["architecture"] == "qwen3moe"
    assert (info["experts"], info["top_k"]) == (64, 4)


def test_status_without_a_router():
    done = run("status", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr


def test_bench_prints_json():
    figures = json.loads(run("bench", "assign", "--rows", 200, "--columns", 4, "--runs", 1, "--json").stdout)
    assert figures["clustered_ms"] > 0 and figures["contested_ms"] > 0


def test_bench_decide_prints_every_part(tmp_path):
    figures = json.loads(
        run("bench", "decide", "--workers", 3, "--layers", 2, "--experts", 8, "--top-k", 2, "--requests", 4, "--rounds", 2,
            "--json", "--plots", tmp_path).stdout)
    assert [part["p50_us"] > 0 for part in figures["parts"]] == [True] * 5
    assert figures["machine"]["cores"] > 0
    assert (tmp_path / "decide.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("arguments, words", [
    (["nothing"], ["nothing", "assign", "decide"]),
    (["decide", "--workers", "0"], ["workers", "1 to 1024"]),
    (["decide", "--experts", "4", "--top-k", "8"], ["top-k", "--experts"]),
])
def test_bench_refuses(arguments, words):
    done = run("bench", *arguments)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr


def test_bench_fit_without_scipy_says_so():
    done = run("bench", "fit", "--requests", 60, "--dims", 24, "--clusters", 4, "--iterations", 3)
    assert done.returncode == 0
    assert "one iteration" in done.stdout and "--python" in done.stdout


def test_bench_fit_names_a_python_without_scipy(tmp_path):
    done = run("bench", "fit", "--requests", 60, "--dims", 24, "--clusters", 4, "--python", tmp_path / "no-python")
    assert done.returncode == 1
    assert "no-python" in done.stderr


def test_widened_model_serves_and_its_steps_are_paced(tmp_path):
    """Widening keeps tokens and counts; a paced worker says that it is one."""
    wide = tmp_path / "wide.gguf"
    widened = run("model", "widen", MODEL, wide, "--factor", 2, "--type", "q8_0")
    assert widened.returncode == 0, widened.stderr
    assert "128 neurons instead of 64" in widened.stdout
    assert run("model", "widen", wide, wide, "--factor", 2).returncode == 2
    assert "powers of two" in run("model", "widen", MODEL, tmp_path / "x.gguf", "--factor", 3).stderr

    profile = tmp_path / "pace.json"
    pace = {"v": 1, "name": "test", "source": "made up", "step_us": 5000, "prefill_us_per_token": 0,
            "per_sequence_us": 0, "expert_us": 100, "layers": 6}
    profile.write_text(json.dumps(pace))
    body = chat(return_expert_counts=True, return_expert_gates=True)
    answers = []
    for model, extra in [(MODEL, []), (wide, ["--pace", profile])]:
        worker = Server("worker", "--model", model, "--threads", 1, *extra, log=tmp_path / "worker.log")
        try:
            worker.wait_ready()
            answers.append(post_json(worker.url + "/v1/chat/completions", body)[1])
            kindred = get_json(worker.url + "/v1/models")["data"][0]["kindred"]
            assert kindred.get("paced") == ("test" if extra else None)
            if extra:
                assert metric(worker.url, "kindred_paced") == 1
                assert metric(worker.url, "kindred_paced_steps_total") > 0
        finally:
            worker.stop()
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]
    assert answers[0]["expert_counts"] == answers[1]["expert_counts"]
    assert answers[0]["expert_gates"]["experts"] == 64

    profile.write_text(json.dumps(pace | {"expert_us": -1}))
    refused = run("worker", "--model", MODEL, "--pace", profile)
    assert refused.returncode == 2
    assert "expert_us: got -1; accepted" in refused.stderr


def test_bench_step(tmp_path):
    done = run("bench", "step", "--model", MODEL, "--prompts", ROOT / "data/prompts/calibration.jsonl", "--factor", 1,
               "--batch", 4, "--seconds", 1, "--threads", 1, "--json", "--plots", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    of_copies = [b for b in report["batches"] if b["series"] == "batch"]
    assert {b["batch"] for b in of_copies} == {1, 2, 4}
    assert all(b["distinct_experts"] == 4 for b in of_copies)  # top-k, however many copies
    assert max(b["distinct_experts"] for b in report["batches"]) > 4
    assert (tmp_path / "step-experts.svg").exists() and (tmp_path / "step-batch.svg").exists()
