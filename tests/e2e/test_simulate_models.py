"""`kindred simulate profile`, `calibrate` and `advise` as an operator runs them."""
import json
import random

import pytest

from cluster import ROOT
from test_cli import run

LAYERS, EXPERTS, TOP_K = 24, 32, 4  # gpt-oss-20b


@pytest.fixture
def recorded(tmp_path):
    """Token decisions of two domains, each of which keeps to its own half of the experts."""
    draw = random.Random(1)
    tokens, index = bytearray(), []
    for request in range(120):
        half = request % 2 * EXPERTS // 2
        index.append({"token_offset": len(tokens) // (LAYERS * TOP_K), "decode_tokens": 64, "domain": str(half)})
        for _ in range(64 * LAYERS):
            tokens += bytes(half + e for e in draw.sample(range(EXPERTS // 2), TOP_K))
    (tmp_path / "experts.u8").write_bytes(tokens)
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in index))
    return tmp_path


def test_advice(recorded):
    done = run("simulate", "--advise", recorded, "--profile", "h200-gpt-oss-20b", "--workers", 2, "--batch", 16,
               "--ranks", 1, "--json")
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)
    assert (advice["requests"], advice["cohorts"]) == (60, 2)
    (row,) = advice["rows"]
    # 16 even choices of 4 out of 16, and half as many from each half.
    assert row["cohort"] == pytest.approx(16 * (1 - 0.75**16), abs=0.3)
    assert row["mixed"] == pytest.approx(32 * (1 - 0.75**8), abs=0.6)
    assert "Worth trying" in advice["verdict"]


def test_advice_of_another_model(recorded):
    done = run("simulate", "advise", recorded, "--profile", "h200-qwen3-30b-a3b")
    assert done.returncode == 1
    assert "48 MoE layers and top 8" in done.stderr
    done = run("simulate", "advise", recorded, "--profile", "h900")
    assert done.returncode == 2
    assert "h200-gpt-oss-20b" in done.stderr


def test_calibration():
    done = run("simulate", "calibrate", "--evaluations", 1, "--layers", 2, "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure["reached"] for figure in json.loads(done.stdout)["figures"]}
    assert 0.70 <= figures["prefill/decode correlation"] <= 0.92
    assert 0.16 <= figures["fewer experts, one domain"] <= 0.22
    assert run("simulate", "calibrate", "--experts", 4, "--top-k", 5).returncode == 2


def test_profiles_need_all_kernels(tmp_path):
    # The copy for tests lacks most of the models.
    done = run("simulate", "profile", "--from", ROOT / "tests/data/kernels", "--output", tmp_path)
    assert done.returncode == 1
    assert "moe_kernels" in done.stderr and "Qwen3-30B-A3B on h100" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert run("simulate", "profile").returncode == 2
