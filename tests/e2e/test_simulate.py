"""`kindred simulate` as an operator runs it: equal seeds, files, and what it says to nonsense."""
import csv
import json
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


@pytest.mark.parametrize("args, says", [
    (["--profile", "h900"], ["--profile", "no 'h900'", "h200-qwen3-30b-a3b"]),
    (["--profile", "/nowhere/x.json"], ["/nowhere/x.json"]),
    (["--workers", "8X"], ["--workers", "8X", "8P16D"]),
    (["--workers", "8P"], ["prefill and decode workers"]),
    (["--workers", "2P,2D:h200-gpt-oss-120b"], ["--workers", "one model"]),
    (["--policy", "best"], ["best", "locality-band"]),
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
