"""Kindred beside other routers, in one run on one machine: what they cost, and what they do when things go wrong.

    ./dev compare [--quick] [--vllm] [--page docs/compare.md]

Behind all of them are the same workers: `kindred simulate --serve`, or with --vllm real vLLM servers on the CPU. Rounds
go through the routers in turn, so that what else the machine does falls on all. Each router is started as its own
documentation says for the case.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import behaviour  # noqa: E402
import load  # noqa: E402
from peers import BINARY, PEERS, ROOT, VENVS, answers_chat, pd_args, plain_args, started, wait_until  # noqa: E402

COLUMNS = ("router", "TTFT p50 ms", "p99 ms", "TPOT p50 ms", "tokens/s", "processor us/request", "failed")


def say(text):
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def simulated(workers, dialect, folder):
    """(prefill URLs, decode URLs, whole URLs) of mock workers in one process, and the model's name."""
    log = folder / f"fleet-{workers}-{dialect}.log"
    command = [BINARY, "simulate", "--serve", "--workers", workers, "--dialect", dialect, "--port", "0"]
    command += ["--profile", "h200-gpt-oss-20b", "--domains", "2"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:

        def ready():
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            return "ready; a router for them:" in log.read_text()

        wait_until(ready, 120, "mock workers")
        words = log.read_text().split("ready; a router for them:\n")[1].split("\n")[0].split()
        urls = {
            role: [b for a, b in itertools.pairwise(words) if a == f"--{role}"]
            for role in ("prefill", "decode", "worker")
        }
        yield urls, "simulated"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def real_vllm(folder):
    """One prefill and two decode servers, all of which do whole requests as well."""
    sys.path.insert(0, str(ROOT / "integrations/vllm/e2e"))
    import vllm_fleet

    model = vllm_fleet.write_model(folder / "model")
    servers = []
    try:
        for name, connector in (("p0", vllm_fleet.PRODUCER), ("d0", vllm_fleet.DECODE), ("d1", vllm_fleet.DECODE)):
            servers.append(vllm_fleet.VllmServer(name, model, folder / f"{name}.log", connector))
        for server in servers:
            server.wait_ready()
        urls = [server.url for server in servers]
        yield {"prefill": urls[:1], "decode": urls[1:], "worker": urls[1:]}, vllm_fleet.NAME
    finally:
        for server in servers:
            server.stop()


def measure(case, peers, args_of, model, size, rounds, folder):
    """The runs of each router for which `args_of` has flags, in turn, why others have none, and their command lines."""
    rows = {peer.name: [] for peer in peers}
    why_not, commands = {}, {}
    for round_ in range(rounds):
        # Back and forth, so that a machine that gets slower is unfair to nobody.
        for peer in peers if round_ % 2 == 0 else list(reversed(peers)):
            args = args_of(peer)
            if isinstance(args, str):
                why_not[peer.name] = args
            if peer.name in why_not:
                continue
            plan = load.Plan(model=model, seed=100 + round_, **size)
            log = folder / f"{peer.name}-{case}-{round_}.log"
            small = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            try:
                with started(peer, args, log, answers_chat(small)) as router:
                    load.run(
                        router.port, load.Plan(model=model, seed=7, **{**size, "requests": 8})
                    )  # connections, pages
                    before_s = router.processor_s()
                    outcome = load.run(router.port, plan)
                    used_s = router.processor_s() - before_s
                    commands[peer.name] = router.command
            except RuntimeError as error:
                why_not[peer.name] = str(error).splitlines()[0]
                say(f"{case}: {error}")
                continue
            rows[peer.name].append((outcome, used_s / plan.requests))
            seen = f"{len(outcome.ttft_s)} answers, {len(outcome.failed)} failed"
            say(f"{case}, round {round_ + 1} of {rounds}: {peer.name}: {seen}")
    return rows, why_not, commands


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def table_of(rows, why_not, peers):
    out = []
    for peer in peers:
        runs = rows[peer.name]
        if not runs:
            out.append((peer.name, *("–",) * 5, why_not[peer.name]))
            continue

        def middle(of, runs=runs):
            return statistics.median(of(outcome, cost) for outcome, cost in runs)

        failed = sum(len(outcome.failed) for outcome, _ in runs)
        requests = failed + sum(len(outcome.ttft_s) for outcome, _ in runs)
        why = f" ({runs[0][0].failed[0]})" if runs[0][0].failed else ""
        out.append(
            (
                peer.name,
                f"{1000 * middle(lambda o, _: quantile(o.ttft_s, 0.5)):.1f}",
                f"{1000 * middle(lambda o, _: quantile(o.ttft_s, 0.99)):.1f}",
                f"{1000 * middle(lambda o, _: quantile(o.tpot_s, 0.5)):.2f}",
                f"{middle(lambda o, _: o.tokens / o.wall_s):.0f}",
                f"{1e6 * middle(lambda _, c: c):.0f}",
                f"{failed} of {requests}{why}",
            )
        )
    return out


def markdown(columns, rows):
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def relay(peers, requests, rounds):
    """`kindred bench relay`: processor time where workers answer at once, 64 connections always busy."""
    command = [
        BINARY,
        "bench",
        "relay",
        "--json",
        "--streams",
        "0",
        "--requests",
        str(requests),
        "--rounds",
        str(rounds),
    ]
    for peer in peers:
        if peer.name != "kindred":
            command += [f"--{peer.name}", peer.program[0]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        say(done.stderr)
        return None
    return json.loads(done.stdout)


def relay_table(found):
    def of(target, name):
        return statistics.median(target[name])

    return [
        (
            target["name"],
            f"{of(target, 'request_us'):.0f}",
            f"{of(target, 'event_us'):.2f}",
            f"{of(target, 'long_prompt_us'):.0f}",
            f"{of(target, 'requests_per_s'):.0f}",
        )
        for target in found["targets"]
    ] + [(text, *("–",) * 4) for text in found["absent"]]


def machine():
    model = next(
        (
            line.split(":")[1].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"


def flags_of(command):
    """As an operator would write it: without addresses and paths."""
    out = [pathlib.Path(command[0]).name]
    for before, word in itertools.pairwise(command):
        if {before, word} & {"--host", "--port", "--prometheus-port"}:
            continue
        out.append("URL" if word.startswith("http://") else word)
    return " ".join(out)


class Page:
    """What is printed, and kept in a file as well, so that a run that is ended has written what it has found."""

    def __init__(self, path):
        self._parts, self._path = [], path

    def add(self, text):
        self._parts.append(text)
        print(text + "\n", flush=True)
        if self._path:
            self._path.write_text("\n\n".join(self._parts) + "\n")


def main():
    parser = argparse.ArgumentParser(
        prog="./dev compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of few requests")
    parser.add_argument("--vllm", action="store_true", help="also with real vLLM servers (9 GB of memory)")
    parser.add_argument(
        "--only", action="append", choices=["behaviour", "relay", "plain", "pd"], help="part of it; default: all"
    )
    parser.add_argument("--peer", action="append", choices=[peer.name for peer in PEERS], help="default: all")
    parser.add_argument("--page", type=pathlib.Path, help="write the report here, too, as Markdown")
    args = parser.parse_args()
    peers = [peer for peer in PEERS if args.peer is None or peer.name in args.peer]
    wanted = set(args.only or ["behaviour", "relay", "plain", "pd"])
    missing = [
        peer.name for peer in peers if peer.name != "kindred" and not (VENVS / peer.name / "bin/python").exists()
    ]
    if missing:
        sys.exit(f"compare: not installed: {', '.join(missing)}; ./dev compare does that")

    rounds = 1 if args.quick else 3
    size = {"requests": 60 if args.quick else 200, "per_s": 20, "prompt_words": 150, "max_tokens": 32}
    began_s, load_before = time.monotonic(), os.getloadavg()[0]
    page = Page(args.page)
    page.add(f"# Kindred beside other routers\n\nWritten by `./dev compare {' '.join(sys.argv[1:])}`."
             " One run, one machine, the same workers and the same"
             " requests at the same times for all; the routers take turns, and a figure is the median of the rounds."
             " Where a router does worse here, it may do better elsewhere: what is compared is routing over HTTP, not"
             " tokenising, caches of prompts or anything else that they have and this does not ask for.")  # fmt: skip
    page.add(f"Machine: {machine()}. Runnable tasks on it when this began: {load_before:.1f} (on a busy"
             f" machine latencies say little; processor time holds). Rounds: {rounds}.")  # fmt: skip
    page.add(markdown(("router", "version"), [(peer.name, peer.version()) for peer in peers]))
    with tempfile.TemporaryDirectory(prefix="kindred-compare-") as name:
        folder = pathlib.Path(name)
        commands = {}
        if "behaviour" in wanted:
            add_behaviour(page, peers, folder)
        if "relay" in wanted:
            add_relay(page, peers, 500 if args.quick else 2000, rounds)
        for backend in ["simulated", "vllm"] if args.vllm else ["simulated"]:
            add_load(page, backend, peers, wanted, size, rounds, folder, commands)
        if commands:
            lines = [f"- {case}: `{flags_of(command)}`" for case, command in commands.items()]
            page.add("## How they were started\n\n" + "\n".join(lines))
    say(f"took {time.monotonic() - began_s:.0f} s")


def add_behaviour(page, peers, folder):
    found = {peer.name: behaviour.run(peer, folder, say) for peer in peers}
    rows = []
    for i, (sentence, _) in enumerate(behaviour.CHECKS):
        cells = []
        for peer in peers:
            _, good, seen = found[peer.name][i]
            cells.append(("yes" if good else "**no**" if good is not None else "not tried") + f": {seen}")
        rows.append((sentence, *cells))
    page.add("## Behaviour\n\nThe same black-box checks for all (`tests/compare/behaviour.py`), over scripted workers that"
             " pass for vLLM servers; health checks once a second, retries and breakers as they come.\n\n"
             + markdown(("promise", *(peer.name for peer in peers)), rows))  # fmt: skip


def add_relay(page, peers, requests, rounds):
    say("bench relay")
    found = relay(peers, requests, rounds)
    if found is None:
        return
    columns = ("router", "processor us/request", "us/event of a stream", "us/request of 600 kB", "requests/s")
    page.add("## As a data plane\n\n`kindred bench relay`: workers that answer at once, 64 connections that are never"
             " idle, nginx beside. Requests a second are what this machine gives clients, workers and router together."
             "\n\n" + markdown(columns, relay_table(found)))  # fmt: skip


def add_load(page, backend, peers, wanted, size, rounds, folder, commands):
    real = backend == "vllm"
    if real:
        size = {**size, "requests": 20, "per_s": 1, "prompt_words": 60, "max_tokens": 16}
        rounds = min(rounds, 2)
    words = f"{size['requests']} requests a round, {size['per_s']} a second, Poisson, {size['prompt_words']} words on"
    words += f" average, {size['max_tokens']} tokens"
    title = (
        "real vLLM servers on the CPU" if real else "simulated workers (`kindred simulate --serve`, h200-gpt-oss-20b)"
    )
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(real_vllm(folder)) if real else None

        def case(name, workers, dialect, args_of):
            with contextlib.ExitStack() as own:
                urls, model = fleet or own.enter_context(simulated(workers, dialect, folder))
                found = measure(
                    f"{backend}-{name}", peers, lambda peer: args_of(peer, urls), model, size, rounds, folder
                )
            rows, why_not, started_as = found
            commands.update({f"{peer}, {name}": command for peer, command in started_as.items()})
            return markdown(COLUMNS, table_of(rows, why_not, peers))

        if "plain" in wanted:
            table = case("turn by turn", "3B", "openai", lambda peer, urls: plain_args(peer, urls["worker"]))
            page.add(
                f"## Turn by turn: {title}\n\n{words}; {'2' if real else '3'} workers, round robin for all.\n\n{table}"
            )
        if "pd" in wanted:
            for engine in ["vllm"] if real else ["vllm", "sglang"]:

                def args_of(peer, urls, engine=engine):
                    return pd_args(peer, engine, urls["prefill"], urls["decode"], bootstrap_ports=[8998])

                table = case(f"prefill and decode, {engine}", "1P2D", engine, args_of)
                page.add(
                    f"## Prefill and decode apart, {engine}: {title}\n\n{words}; 1 prefill and 2 decode workers."
                    f"\n\n{table}"
                )


if __name__ == "__main__":
    main()
