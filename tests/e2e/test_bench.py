"""The benches on toy sizes: that they run, agree with themselves and refuse what makes no sense. Their figures
here mean nothing."""
import json

import pytest

from cluster import ROOT
from test_cli import run

SMALL = ["--workers", 2, "--rounds", 1, "--seconds", 2, "--rate", 4, "--tokens", 8]


@pytest.fixture(scope="module")
def few_prompts(tmp_path_factory):
    lines = (ROOT / "data/prompts/bench_language.jsonl").read_text().splitlines()[:18]
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_locality_measures_every_policy_and_cache_mode(few_prompts, tmp_path):
    done = run("bench", "locality", *SMALL, "--prompts", few_prompts, "--policy", "round-robin", "--policy", "locality-band",
               "--cache", "both", "--pool", 6, "--json", "--plots", tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [(arm["policy"], arm["prefix_cache"]) for arm in figures["arms"]] == [
        ("round-robin", False), ("round-robin", True), ("locality-band", False), ("locality-band", True)]
    requests = {arm["requests"] for arm in figures["arms"]}
    assert len(requests) == 1 and requests.pop() > 0
    for arm in figures["arms"]:
        assert arm["failed"] == 0
        assert arm["decode_prompt_tokens"] == 0
        assert arm["tpot_p50_s"] > 0 and arm["active_experts"] > 0
    assert figures["paced"] == "pace-demo"
    assert figures["signatures"]["equal"] == figures["signatures"]["compared"] > 0
    for chart in ("locality_tpot", "locality_batch", "locality_experts"):
        assert (tmp_path / f"{chart}.svg").read_text().startswith("<svg")


def test_locality_with_shuffled_signatures_says_so(few_prompts):
    done = run("bench", "locality", *SMALL, "--prompts", few_prompts, "--policy", "round-robin", "--policy", "locality-band",
               "--shuffle-signatures", "--unpaced")
    assert done.returncode == 0, done.stderr
    assert "shuffled" in done.stdout and "not paced" in done.stdout


@pytest.mark.parametrize("arguments, words", [
    (["--policy", "nearest"], ["nearest", "locality-band", "round-robin"]),
    (["--workers", "0"], ["workers", "1 to 64"]),
    (["--mix", "music"], ["mix", "language", "task"]),
    (["--prompts", "/nowhere.jsonl"], ["/nowhere.jsonl"]),
    (["--model", "/nowhere.gguf"], ["/nowhere.gguf"]),
])
def test_locality_refuses(arguments, words):
    done = run("bench", "locality", *arguments)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr


def test_locality_needs_a_prompt_per_worker(tmp_path):
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    done = run("bench", "locality", "--prompts", prompts)
    assert done.returncode == 1
    assert "too few prompts" in done.stderr


def test_place_judges_every_solver():
    done = run("bench", "place", "--layers", 2, "--experts", 16, "--ranks", 4, "--sources", 2, "--runs", 1,
               "--golden", ROOT / "tests/data/golden", "--time-limit-s", 1, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {row["solver"] for row in figures["solvers"]} >= {"flow", "greedy", "eplb", "moetuner", "sem-moe"}
    known = [row for row in figures["goldens"] if row["solver"] == "flow"]
    assert len(known) == 12
    assert all(-1e-9 < row["above_optimum"] <= 1e-3 for row in known)
    assert run("bench", "place", "--ranks", 3).returncode == 2


def test_policies_compares_every_policy_and_draws(tmp_path):
    done = run("bench", "policies", "--quick", "--seeds", 1, "--only", "batch 4", "--json", "--plots", tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["workers"], cell["batch"], cell["mix"]) for cell in cells] == [(8, 4, "skewed")]
    rows = {row["policy"]: row for row in cells[0]["rows"]}
    assert {"round-robin", "least-loaded", "power-of-two", "domain", "band tau=0.1", "marginal-cost"} <= rows.keys()
    assert all(row["tpot_s"][0] > 0 for row in rows.values())
    assert rows["marginal-cost"]["active_experts"] < rows["least-loaded"]["active_experts"]
    assert (tmp_path / "policies-batch.svg").read_text().startswith("<svg")
    refused = run("bench", "policies", "--only", "batch 5")
    assert refused.returncode != 0 and "batch 5" in refused.stderr


def test_pressure_live_gives_every_policy_the_same_requests():
    done = run("bench", "pressure", "--live", "--mix", "two-end", "--live-rate", 3, "--seeds", 1, "--seconds", 3,
               "--policy", "request-count", "--policy", "pressure+sjf-aging", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["live"] and figures["paced"] == "pace-demo" and figures["engines"] == 2
    assert figures["paced_steps"] >= figures["pace_overruns"] >= 0 and figures["paced_steps"] > 0
    assert figures["requests"] == 2 * 9 and figures["failed"] == 0
    assert [(row["policy"], row["mix"], row["rate"]) for row in figures["rows"]] == [
        ("request-count", "two-end", 3), ("pressure+sjf-aging", "two-end", 3)]
    for row in figures["rows"]:
        assert row["by_seed"] == [row["mean"]]
        assert 0 < row["mean"]["ttft_s"] <= row["mean"]["ttft_p99_s"] <= 2 * figures["took_s"]
        assert row["mean"]["ttft_s"] < row["mean"]["total_s"] and row["mean"]["tpot_s"] > 0
        assert row["mean"]["gap_tokens_per_s"] >= 0 and 0 <= row["mean"]["kv"] <= 1


@pytest.mark.parametrize("arguments, words", [
    (["--ablation"], ["ablation", "--live"]),
    (["--setup", "dp2"], ["setup", "--live"]),
    (["--live-rate", "fast"], ["live-rate", "fast", "above 0"]),
    (["--live-rate", "nan"], ["live-rate", "nan"]),
    (["--policy", "replay"], ["policy", "replay", "request-count"]),
    (["--mix", "music"], ["mix", "music", "two-end"]),
    (["--engines", "1"], ["engines", "2 to 16"]),
])
def test_pressure_live_refuses(arguments, words):
    done = run("bench", "pressure", "--live", *arguments)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr


def test_coordinate_runs_every_arm(tmp_path):
    done = run("bench", "coordinate", "--quick", "--settle-s", 0.5, "--seconds", 0.5, "--factor", 1, "--output-tokens", 4,
               "--longest-prompt", 32, "--json", "--plots", tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    rows = {row["arm"]: row for row in figures["rows"]}
    assert list(rows) == ["baseline", "DP only", "EP only", "both, no feedback", "both"]
    for row in rows.values():
        assert row["ranks"] == 2 and row["requests"] > 0 and row["step_ms"] > 0
        assert 1 <= row["imbalance"] <= row["dispatch_imbalance"] <= 2
        assert 0 < row["remote_share"] < 1
        assert 0 < row["rank_active_experts"] <= figures["experts"]
    assert rows["DP only"]["moves"] == rows["DP only"]["placements"] == 0
    simulated = {row["arm"]: row for row in figures["simulated"]["rows"]}
    assert list(simulated) == list(rows)
    for row in simulated.values():
        assert 0 < row["tpot_ms"] and 0 < row["ttft_ms"] < row["ttft_p99_ms"]
        assert 0 < row["remote_share"] < 1 <= row["imbalance"]
    assert simulated["DP only"]["placements"] == 0
    for chart in ("coordinate-remote", "coordinate-imbalance"):
        assert (tmp_path / f"{chart}.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("arguments, words", [
    (["--ranks", "1"], ["ranks", "2 to 1024"]),
    (["--ranks", "3"], ["ranks", "hold as many"]),
    (["--engines", "5"], ["prompts", "4 domains"]),
    (["--bound-share", "2"], ["bound-share", "0 to 1"]),
])
def test_coordinate_refuses(arguments, words):
    done = run("bench", "coordinate", "--quick", "--factor", 1, *arguments)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
