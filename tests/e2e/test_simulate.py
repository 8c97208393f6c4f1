"""`kindred simulate` as an operator runs it: equal seeds, files, and what it says to nonsense."""
import csv
import json
import struct
import xml.etree.ElementTree

import pytest

from cluster import ROOT
from test_cli import run

SMALL = ["--workers", "2P4D", "--rate", 20, "--seconds", 5, "--calibration", 64, "--domains", 4,
         "--base", 1, "--domain", 1, "--request", 0.3]


def simulate(*args):
    done = run("simulate", *SMALL, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_equal_seeds_give_equal_results_and_others_do_not():
    one, two, other = simulate("--json"), simulate("--json"), simulate("--json", "--seed", 2)
    assert one == two
    assert one != other
    figures = json.loads(one)
    assert [arm["policy"] for arm in figures["policies"]] == ["least-loaded", "locality-band"]
    for arm in figures["policies"]:
        summary = arm["summary"]
        assert summary["ended"] == {"ok": figures["requests"], "no_worker": 0, "room_full": 0, "worker_lost": 0}
        assert 0 < summary["ttft_s"]["p50"] <= summary["ttft_s"]["p99"]
        assert 8 <= summary["active_experts"] <= 128
        assert arm["fallbacks"] == {}
        assert len(arm["workers"]) == 6


def test_files(tmp_path):
    simulate("--csv", tmp_path / "run.csv", "--perfetto", tmp_path / "run.json", "--plots", tmp_path)
    for policy in ("least-loaded", "locality-band"):
        rows = list(csv.DictReader((tmp_path / f"run.{policy}.csv").open()))
        assert len(rows) > 50
        assert {row["ended"] for row in rows} == {"ok"}
        assert {row["domain"] for row in rows} == {f"domain-{d}" for d in range(4)}
        assert all(float(row["arrival_s"]) < float(row["first_token_s"]) <= float(row["last_token_s"]) for row in rows)
        trace = json.loads((tmp_path / f"run.{policy}.json").read_text())
        assert {"X", "M", "b", "e"} == {event["ph"] for event in trace["traceEvents"]}
    for chart in ("simulate-ttft", "simulate-tpot", "simulate-experts"):
        xml.etree.ElementTree.parse(tmp_path / f"{chart}.svg")


def test_a_worker_fails_and_a_plain_cluster_works():
    text = simulate("--policy", "least-loaded", "--event", "2:fail:decode-1", "--per-worker")
    assert "requests failed: worker_lost" in text
    assert "decode-3" in text
    plain = json.loads(simulate("--workers", "3B", "--policy", "round-robin", "--json"))
    assert plain["policies"][0]["summary"]["ended"]["ok"] == plain["requests"]


def test_engines_are_chosen_by_the_router():
    args = ["--workers", "1B", "--engines", 3, "--engine-policy", "request-count", "--engine-policy", "pressure",
            "--queue-policy", "sjf-aging", "--json"]
    one, two = simulate(*args), simulate(*args)
    assert one == two
    figures = json.loads(one)
    assert [arm["policy"] for arm in figures["policies"]] == ["request-count", "pressure"]
    for arm in figures["policies"]:
        assert arm["summary"]["ended"]["ok"] == figures["requests"]
        assert arm["fallbacks"].get("no_trace", 0) <= 1  # before the first traces


def test_bench_pressure_prints_every_run_and_draws(tmp_path):
    args = ["--quick", "--requests", 40, "--setup", "2x1", "--policy", "request-count", "--policy", "pressure+sjf-aging"]
    done = run("bench", "pressure", *args, "--json", "--plots", tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["failed"] == 0
    assert {(row["mix"], row["policy"]) for row in figures["rows"]} == {
        (mix, policy) for mix in ("random", "two-end") for policy in ("request-count", "pressure+sjf-aging")}
    assert all(0 < row["mean"]["ttft_s"] <= row["mean"]["ttft_p99_s"] for row in figures["rows"])
    for chart in ("ttft-2x1", "ttft-p99-2x1", "tpot-2x1", "gap-2x1", "running", "kv"):
        xml.etree.ElementTree.parse(tmp_path / f"bench-pressure-{chart}.svg")
    text = run("bench", "pressure", *args).stdout
    assert "pressure+sjf-aging" in text and "gap tokens/s" in text
    for wrong, accepted in ((["--setup", "dp9"], "2x1"), (["--mix", "odd"], "two-end"), (["--policy", "odd"], "vllm-0.27")):
        refused = run("bench", "pressure", "--quick", *wrong)
        assert refused.returncode == 2
        assert accepted in refused.stderr


def test_traces_of_others(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 200 * i, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 100 + i],
              "domain": f"d{i % 2}"} for i in range(30)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = json.loads(simulate("--trace", trace, "--json", "--csv", tmp_path / "run.csv", "--policy", "domain"))
    assert figures["requests"] == 30
    prefill = figures["policies"][0]["summary"]["prefill"]
    # All prompts begin alike and meet at one worker, which keeps the two blocks: all but the first find them.
    assert prefill["cached"] == pytest.approx(29 * 1024 / (30 * 1500))
    rows = list(csv.DictReader((tmp_path / "run.csv").open()))
    assert {row["domain"] for row in rows} == {"d0", "d1"}
    assert rows[5]["arrival_s"] == "1.000000000"
    resampled = json.loads(simulate("--trace", trace, "--resample", "--rate", 40, "--seconds", 5, "--json"))
    assert resampled["requests"] == 200
    lines[7]["input_length"] = -1
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("simulate", *SMALL, "--trace", trace)
    assert done.returncode == 2
    assert "8" in done.stderr and "input_length" in done.stderr


def write_activations(path, requests=48, layers=2, experts=128, top_k=8, tokens=40):
    """Two domains, each with a half of the experts; every expert of the half as often as the other."""
    rows = []
    for i in range(requests):
        half = [experts // 2 * (i % 2) + e for e in range(experts // 2)]
        counts = [0] * experts
        for j in range(tokens * top_k):
            counts[half[j % len(half)]] += 1
        rows += counts * layers
    sizes = {"prefill_counts": rows, "decode_counts": rows, "prompt_tokens": [tokens] * requests,
             "decode_tokens": [tokens] * requests}
    header = {"__metadata__": {"format": "kindred.activations.v1", "model": "m", "model_fingerprint": "f",
                               "layers": json.dumps(list(range(layers))), "top_k": str(top_k),
                               "domains": json.dumps([f"d{i % 2}" for i in range(requests)])}}
    data = b""
    for name, values in sizes.items():
        packed = struct.pack(f"<{len(values)}I", *values)
        shape = [requests, layers, experts] if name.endswith("counts") else [requests]
        header[name] = {"dtype": "U32", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_recorded_experts(tmp_path):
    activations = tmp_path / "a.safetensors"
    write_activations(activations)
    figures = json.loads(simulate("--experts", activations, "--policy", "random", "--policy", "locality-band",
                                  "--tau", 0, "--workers", "1P2D", "--json"))
    mixed, sorted_by_domain = (arm["summary"]["active_experts"] for arm in figures["policies"])
    assert sorted_by_domain < 0.9 * mixed
    assert sorted_by_domain < 66  # half of the experts, and what spills over the load cap
    assert figures["policies"][1]["fallbacks"] == {}


@pytest.mark.parametrize("args, says", [
    (["--profile", "h900"], ["--profile", "no 'h900'", "h200-qwen3-30b-a3b"]),
    (["--profile", "/nowhere/x.json"], ["/nowhere/x.json"]),
    (["--workers", "8X"], ["--workers", "8X", "8P16D"]),
    (["--workers", "8P"], ["prefill and decode workers"]),
    (["--workers", "2P,2D:h200-gpt-oss-120b"], ["--workers", "one model"]),
    (["--policy", "best"], ["best", "locality-band"]),
    (["--engine-policy", "best"], ["best", "request-count"]),
    (["--queue-policy", "best"], ["best", "sjf-aging"]),
    (["--kv-tokens", 64, "--lengths", "fixed"], ["do not fit", "--kv-tokens"]),
    (["--event", "2:explode:decode-1"], ["--event", "fail, leave, join"]),
    (["--event", "2:fail:decode-9"], ["--event", "prefill-0 to decode-3"]),
    (["--experts", "/nowhere.safetensors"], ["/nowhere.safetensors"]),
    (["--experts", ROOT / "models/kindred-tiny-moe.activations.safetensors"], ["experts"]),
    (["--rate", "1e-6"], ["no request arrives", "--rate"]),
    (["--ranks", 3], ["ranks"]),
])
def test_says_what_is_wrong(args, says):
    done = run("simulate", *SMALL, *args)
    assert done.returncode != 0
    assert done.stdout == ""
    for part in says:
        assert part in done.stderr
