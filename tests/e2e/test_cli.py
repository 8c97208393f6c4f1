"""The tools around the cluster: record, fit, status, model, help."""

import json
import math
import struct
import subprocess
import xml.etree.ElementTree

import pytest

from cluster import ACTIVATIONS, BINARY, MODEL, ROOT, Server, chat, get_json, metric, post_json, wait_until

COMMANDS = ["worker", "router", "picker", "demo", "record", "fit", "place", "simulate", "bench", "status", "model"]


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


def activations_file(path, **changes):
    """12 requests of two domains, two layers of four experts, top 1; `changes` replace tensors or metadata."""
    requests, layers, experts = 12, 2, 4
    rows, decoded = [], []
    for i in range(requests):
        own = i % 2 * 2
        for layer in range(layers):
            rows += [5 if e == own else 1 if e in (own + 1, (own + 2 + layer + i // 4) % 4) else 0 for e in range(experts)]
            decoded += [3 if e == own else 1 if e == own + 1 else 0 for e in range(experts)]
    sums = [sum(rows[j : j + experts]) for j in range(0, len(rows), experts)]
    for j, total in enumerate(sums):  # a cell that was named twice counts once: top the row up
        rows[j * experts] += 7 - total
    shape = [requests, layers, experts]
    tensors = {
        "prefill_counts": ("U32", shape, rows),
        "decode_counts": ("U32", shape, decoded),
        "prompt_tokens": ("U32", [requests], [7] * requests),
        "decode_tokens": ("U32", [requests], [4] * requests),
    }
    metadata = {
        "format": "kindred.activations.v1", "model": "made-up", "model_fingerprint": "f", "layers": "[0,1]", "top_k": "1",
        "domains": json.dumps(["a" if i % 2 == 0 else "b" for i in range(requests)]),
    }
    for name, change in changes.items():
        if isinstance(change, str):
            metadata[name] = change
        else:
            tensors[name] = change(*tensors.get(name, ("F32", shape, [0.9 * c for c in rows])))
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, dims, values) in tensors.items():
        packed = struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'I'}", *values)
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def same(dtype, dims, values):
    return dtype, dims, values


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"decode_counts": lambda d, s, v: (d, [12, 4, 2], v)}, [], "decode_counts' has shape [12, 4, 2]"),
        ({"prompt_tokens": lambda d, s, v: (d, [11], v[1:])}, [], "prefill_counts' has shape [12, 2, 4]"),
        ({"prefill_gate": lambda d, s, v: (d, [12, 4, 2], v)}, [], "prefill_gate' has shape [12, 4, 2]"),
        ({"prefill_gate": lambda d, s, v: (d, s, v[:13] + [math.nan] + v[14:])}, [], "request 1, layer 1: a gate sum of nan"),
        ({"prefill_gate": lambda d, s, v: (d, s, [-0.5] + v[1:])}, [], "accepted: 0 to 7"),
        ({"prefill_counts": lambda d, s, v: (d, s, v[:4] + [0] * 4 + v[8:])}, [], "request 0, layer 1: the counts sum to 0"),
        ({}, ["--workers", 13], "13 workers"),
        ({}, ["--transform", "gate"], "prefill_gate"),
        ({"domains": json.dumps(["a"] * 11)}, [], "11 domain labels for 12 requests"),
    ],
)
def test_fit_names_what_is_wrong_with_activations(tmp_path, changes, flags, message):
    path, out = activations_file(tmp_path / "a.safetensors", **changes), tmp_path / "c.safetensors"
    done = run("fit", path, "--workers", 2, "--output", out, *flags)
    assert done.returncode == 1
    assert message in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("transform", ["count", "count-idf", "log-count", "binary", "gate", "gate-idf"])
def test_fit_every_transform(tmp_path, transform):
    path, out = activations_file(tmp_path / "a.safetensors", prefill_gate=same), tmp_path / "c.safetensors"
    done = run("fit", path, "--workers", 2, "--output", out, "--transform", transform, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["transform"] == transform
    assert report["domain_purity"] == 1
    assert f'"transform":"{transform.replace("-", "_")}"'.encode() in out.read_bytes()


def test_record_gates_and_compare(cluster, tmp_path):
    prompts, activations = tmp_path / "prompts.jsonl", tmp_path / "a.safetensors"
    lines = (ROOT / "data/prompts/calibration.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines[:24]) + "\n")
    recorded = run("record", "--url", cluster.both[0].url, "--prompts", prompts, "--output", activations,
                   "--max-tokens", 16, "--gates")
    assert recorded.returncode == 0, recorded.stderr
    compared = run("fit", activations, "--compare", "--json")
    assert compared.returncode == 0, compared.stderr
    transforms = {t["transform"]: t["peak_rho"] for t in json.loads(compared.stdout)["compare"]}
    assert len(transforms) == 6
    assert all(-1 <= rho <= 1 and rho != 0 for rho in transforms.values())


def test_gate_cohorts_degrade_to_load(cluster, tmp_path):
    """Prefill replies carry no gate sums, so a router with such cohorts goes by load and says why."""
    bytes_of = ACTIVATIONS.read_bytes()
    (size,) = struct.unpack("<Q", bytes_of[:8])
    header, data = json.loads(bytes_of[8 : 8 + size]), bytes_of[8 + size :]
    counts = header["prefill_counts"]
    begin, end = counts["data_offsets"]
    values = struct.unpack(f"<{(end - begin) // 4}I", data[begin:end])
    gates = struct.pack(f"<{len(values)}f", *(0.2 * v + 0.01 for v in values))
    header["prefill_gate"] = {"dtype": "F32", "shape": counts["shape"], "data_offsets": [len(data), len(data) + len(gates)]}
    head = json.dumps(header).encode()
    path, cohorts = tmp_path / "a.safetensors", tmp_path / "c.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head + data + gates)
    fitted = run("fit", path, "--workers", 2, "--transform", "gate-idf", "--output", cohorts)
    assert fitted.returncode == 0, fitted.stderr
    assert "no_gates" in fitted.stdout

    router = cluster.start_router("--decode-policy", "locality-band", "--cohorts", cohorts, name="gate-cohorts")
    try:
        for i in range(3):
            assert post_json(router.url + "/v1/chat/completions", chat(prompt=f"Count to {i}."))[0] == 200
        assert metric(router.url, "kindred_router_fallbacks_total", reason="no_gates") == 3
        decisions = get_json(router.url + "/status?decisions=10")["decisions"]
        assert [d["fallback"] for d in decisions] == ["no_gates"] * 3
    finally:
        router.stop()


def test_fit_single_domain(tmp_path):
    path = activations_file(tmp_path / "a.safetensors", domains=json.dumps(["only"] * 12))
    done = run("fit", path, "--workers", 2, "--output", tmp_path / "c", "--predict", "--plots", tmp_path / "p", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["domain_purity"] == 1
    assert [d["domain"] for d in report["prediction"]["domains"]] == ["only"]
    heat = (tmp_path / "p/domain_heat.svg").read_text()
    assert heat.count(">only<") == 1 and "single domain" in heat


def test_fit_compare_ranks_transforms(tmp_path):
    plain = json.loads(run("fit", ACTIVATIONS, "--compare", "--json").stdout)["compare"]
    assert sorted(t["transform"] for t in plain) == ["binary", "count", "count-idf", "log-count"]
    assert [t["peak_rho"] for t in plain] == sorted((t["peak_rho"] for t in plain), reverse=True)
    assert all(max(t["rho"]) == t["peak_rho"] and len(t["rho"]) == 5 for t in plain)
    fitted = json.loads(run("fit", ACTIVATIONS, "--workers", 4, "--output", tmp_path / "c", "--json").stdout)
    assert fitted["rho"][-1] == next(t["peak_rho"] for t in plain if t["transform"] == "count-idf")

    path = activations_file(tmp_path / "a.safetensors", prefill_gate=same)
    done = run("fit", path, "--compare", "--output", tmp_path / "none")
    assert done.returncode == 0, done.stderr
    assert "gate-idf" in done.stdout and not (tmp_path / "none").exists()


def test_fit_predicts_decode():
    """Figures of the bundled recording, as an independent program computed them."""
    prediction = json.loads(run("fit", ACTIVATIONS, "--predict", "--json").stdout)["prediction"]
    correlation = {d["domain"]: d["correlation"] for d in prediction["domains"]}
    expected = {"ja": 0.640, "de": 0.804, "es": 0.742, "code": 0.804, "legal": 0.849, "math": 0.840}
    assert correlation == {domain: pytest.approx(r, abs=1e-3) for domain, r in expected.items()}
    pairs = prediction["batches"][0]
    assert pairs["batch"] == 2
    assert pairs["active_experts_mixed"] == pytest.approx(7.391402, abs=1e-4)
    assert pairs["active_experts_same_domain"] == pytest.approx(7.136860, abs=1e-4)


def test_fit_balance(tmp_path):
    def fit(path, *flags):
        done = run("fit", path, "--output", tmp_path / "c", "--json", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    vanilla, balanced = (fit(ACTIVATIONS, "--workers", 8, *flags) for flags in (["--unbalanced"], []))
    assert (vanilla["balance"], balanced["balance"]) == ("none", "count")
    assert balanced["most_requests_by_mean"] == 1 < vanilla["most_requests_by_mean"]
    assert vanilla["cosine_cost"] < balanced["cosine_cost"]

    # Domain b decodes nine times as long.
    long = activations_file(
        tmp_path / "a.safetensors",
        decode_tokens=lambda d, s, v: (d, s, [4 * (1 + 8 * (i % 2)) for i in range(12)]),
        decode_counts=lambda d, s, v: (d, s, [c * (1 + 8 * (j // 8 % 2)) for j, c in enumerate(v)]),
    )
    by_work = fit(long, "--workers", 3, "--balance", "work", "--tolerance", 0.1)
    assert by_work["most_work_by_mean"] <= 1.1 < by_work["most_requests_by_mean"]
    assert sum(c["decode_tokens"] for c in by_work["cohorts"]) == 240


def test_fit_plots(tmp_path):
    folder = tmp_path / "deep" / "plots"
    done = run("fit", ACTIVATIONS, "--workers", 4, "--output", tmp_path / "c", "--compare", "--predict", "--plots", folder)
    assert done.returncode == 0, done.stderr
    names = ["batches", "domain_heat", "pca", "prefill_decode", "rho_by_layers", "rho_by_transform"]
    assert sorted(p.stem for p in folder.iterdir()) == names
    for path in folder.iterdir():
        root = xml.etree.ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in path.read_text()
        assert f"{path.stem}.svg" in done.stdout
    blocked = run("fit", ACTIVATIONS, "--compare", "--plots", ACTIVATIONS / "plots")
    assert blocked.returncode == 1 and str(ACTIVATIONS) in blocked.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--transform", "idf"], "count, count-idf, log-count, binary, gate, gate-idf"),
        (["--balance", "time"], "count, work"),
        (["--balance", "work", "--tolerance", 2], "tolerance"),
        (["--balance", "work", "--unbalanced"], "exclude"),
        (["--plots"], "plots"),
    ],
)
def test_fit_wrong_usage(tmp_path, flags, message):
    done = run("fit", ACTIVATIONS, "--workers", 2, "--output", tmp_path / "c", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "c").exists()


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
    assert [part["p50_us"] > 0 for part in figures["parts"]] == [True] * 8
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
