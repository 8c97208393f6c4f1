"""Streams through a real cluster while its workers die, stall and come back and clients leave.

Ends well only if every request that was reported complete has each of its tokens once (by their ids and by
the usage; texts are also compared with a quiet run's, as far as the machine's kernels give the same logits in
every batch), every other one ended in a way that no client can take for complete, the router's memory is flat,
and nothing is left in flight, waiting or leased.

    ./dev soak [SECONDS]           30 minutes by default
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(pathlib.Path(__file__).resolve().parent)]

from cluster import MODEL, Server, get_json, metric, post_json  # noqa: E402
from sse_client import post  # noqa: E402

CHAT = "/v1/chat/completions"
TOPICS = ("the sea", "a sorted list", "contract law", "integration by parts", "le printemps", "das Wetter", "a fever",
          "def quicksort(items):", "la luna", "prime numbers", "a lighthouse", "the liver")
SETTLE_S = 90  # for what runs at the end of the soak to finish
RSS_GROWTH_BYTES = 4 << 20
RSS_GROWTH_SHARE = 0.05


def make_bodies(tokens):
    """Requests whose output a seed fixes."""
    return [{"messages": [{"role": "user", "content": f"Tell me about {topic}."}], "max_tokens": length, "seed": seed,
             "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            for seed, topic in enumerate(TOPICS) for length in (tokens // 3, tokens)]


def content_of(outcome):
    """Of a complete answer: its text, its number of tokens, what the usage says of that, and how often it said why
    it ended."""
    if not outcome.events:
        answer = json.loads(outcome.body)
        choice = answer["choices"][0]
        ends = 1 if choice["finish_reason"] else 0
        return choice["message"]["content"], len(choice["token_ids"]), answer["usage"]["completion_tokens"], ends
    text, tokens, usage, ends = "", 0, None, 0
    for event in map(json.loads, outcome.events[:-1]):
        usage = (event.get("usage") or {}).get("completion_tokens", usage)
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            tokens += len(choice.get("token_ids") or ())
            ends += choice.get("finish_reason") is not None
    return text, tokens, usage, ends


class Fleet:
    """The worker processes, restarted on their own ports."""

    def __init__(self, tmp, decode, worker_args):
        self.tmp, self._args = tmp, worker_args
        self.prefill = self._start("p0", "prefill")
        self.decode = [self._start(f"d{i}", "decode", "--peer", self.prefill.url) for i in range(decode)]
        self.deaths = 0
        for worker in self.all():
            worker.wait_ready()

    def _start(self, name, role, *more, port=None):
        worker = Server("worker", "--model", MODEL, "--role", role, "--threads", 1, *self._args, *more,
                        log=self.tmp / f"{name}.log", port=port)
        worker.name, worker.role, worker.more = name, role, more
        return worker

    def all(self):
        return [self.prefill, *self.decode]

    def restart(self, worker):
        worker.kill()
        worker.stop()
        self.deaths += 1
        fresh = self._start(f"{worker.name}-{self.deaths}", worker.role, *worker.more, port=worker.port)
        fresh.name = worker.name
        if worker is self.prefill:
            self.prefill = fresh
        else:
            self.decode[self.decode.index(worker)] = fresh
        return fresh

    def stop(self):
        for worker in self.all():
            with contextlib.suppress(ProcessLookupError):
                worker.popen.send_signal(signal.SIGCONT)
            worker.stop()


def reference_texts(tmp, bodies, worker_args):
    """What each request generates on one quiet worker that does everything."""
    worker = Server("worker", "--model", MODEL, "--role", "both", "--threads", 1, *worker_args, log=tmp / "reference.log")
    try:
        worker.wait_ready()
        texts = []
        for body in bodies:
            status, answer = post_json(worker.url + CHAT, body)
            assert status == 200, answer
            texts.append(answer["choices"][0]["message"]["content"])
        return texts
    finally:
        worker.stop()


class Soak:
    def __init__(self, options, tmp):
        self.options = options
        self.random = random.Random(options.seed)
        self.bodies = make_bodies(options.tokens)
        worker_args = ["--context-tokens", 512, "--sequences", 96, "--kv-tokens", 96 * 512]
        self.texts = reference_texts(tmp, self.bodies, worker_args)
        self.fleet = Fleet(tmp, options.decode, worker_args)
        urls = [arg for w in self.fleet.all() for arg in (f"--{w.role}", w.url)]
        self.router = Server("router", *urls, "--health-interval-ms", 200, "--idle-deadline-ms", 6000,
                             "--first-deadline-ms", 20_000, "--prefill-deadline-ms", 20_000, "--queue-wait-ms", 5000,
                             log=tmp / "router.log").wait_ready("/ready")
        self.counts = collections.Counter()
        self.faults = []  # what must not happen, with an example each
        self.rss = []
        self.running = 0
        self.peak = 0
        self.end = time.monotonic() + options.seconds

    def over(self):
        return time.monotonic() >= self.end

    def fault(self, kind, detail):
        self.counts[kind] += 1
        if len(self.faults) < 20:
            self.faults.append(f"{kind}: {detail}")

    # --- clients

    async def client(self, number):
        rng = random.Random(f"{self.options.seed}-{number}")
        await asyncio.sleep(rng.random() * 3)
        while not self.over():
            which = rng.randrange(len(self.bodies))
            body = dict(self.bodies[which])
            if rng.random() < 0.85:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            leave_at = rng.randrange(1, 30) if rng.random() < 0.12 else None
            abort_s = rng.uniform(0.01, 5) if rng.random() < 0.08 else None
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                outcome = await post("127.0.0.1", self.router.port, CHAT, body, {"X-Request-Id": f"c{number}"},
                                     lambda o: leave_at is None or len(o.events) < leave_at, abort_s)
            finally:
                self.running -= 1
            self.judge(which, "stream" in body, outcome)
            if outcome.status in (0, 429, 502, 503, 504):
                await asyncio.sleep(rng.uniform(0.2, 1.0))

    def judge(self, which, streams, outcome):
        if outcome.aborted:
            self.counts["left"] += 1
            if any('"error"' in event for event in outcome.events[:-1]):
                self.fault("went on behind an error", outcome.events[-3:])
            return
        if outcome.status == 200 and outcome.complete:
            if streams and not outcome.done:
                return self.fault("ended cleanly without [DONE]", outcome.events[-2:])
            text, tokens, usage, ends = content_of(outcome)
            wanted = self.bodies[which]["max_tokens"]
            if (tokens, usage, ends) != (wanted, wanted, 1):
                return self.fault("lost or doubled tokens", f"{tokens} of {wanted}, usage {usage}, {ends} ends: {text!r}")
            self.counts["complete"] += 1
            self.counts["complete, text of the quiet run"] += text == self.texts[which]
            self.counts["tokens"] += tokens
        elif outcome.status == 200:
            if outcome.done:
                return self.fault("[DONE] in a cut stream", outcome.events[-3:])
            self.counts["cut, told why" if outcome.error else "cut"] += 1
        elif outcome.status == 0:
            self.fault("no answer from the router", "")
        elif outcome.error is None:
            self.fault("an error without an error object", (outcome.status, outcome.body[:200]))
        else:
            self.counts[f"status {outcome.status}"] += 1

    # --- chaos

    async def chaos(self):
        while not self.over():
            await asyncio.sleep(self.random.uniform(*self.options.pause_s))
            if self.over():
                return
            worker = self.fleet.prefill if self.random.random() < 0.15 else self.random.choice(self.fleet.decode)
            if self.random.random() < 0.6:
                self.counts["kills"] += 1
                fresh = await asyncio.to_thread(self.fleet.restart, worker)
                if self.random.random() < 0.7:  # else it dies again while others do, too
                    await asyncio.to_thread(fresh.wait_ready)
            else:
                self.counts["stalls"] += 1
                worker.popen.send_signal(signal.SIGSTOP)
                await asyncio.sleep(self.random.uniform(0.2, 9))
                worker.popen.send_signal(signal.SIGCONT)

    async def watch(self):
        page = os.sysconf("SC_PAGE_SIZE")
        while not self.over():
            statm = pathlib.Path(f"/proc/{self.router.popen.pid}/statm").read_text().split()
            self.rss.append(int(statm[1]) * page)
            await asyncio.sleep(min(1, self.options.seconds / 60))

    async def run(self):
        clients = [asyncio.create_task(self.client(i)) for i in range(self.options.streams)]
        helpers = [asyncio.create_task(self.chaos()), asyncio.create_task(self.watch())]
        await asyncio.gather(*helpers)
        _, late = await asyncio.wait(clients, timeout=SETTLE_S)
        if late:
            self.fault("requests that never end", len(late))
            for task in late:
                task.cancel()
        for task in clients:
            if task not in late and task.exception():
                raise task.exception()

    # --- the end

    def left_behind(self):
        status = get_json(self.router.url + "/status")
        left = {"in flight": status["requests_in_flight"], "waiting": status["requests_waiting"],
                "at workers": sum(w["in_flight"] for w in status["workers"])}
        for worker in self.fleet.all():
            left[f"{worker.name} running"] = metric(worker.url, "vllm:num_requests_running")
            left[f"{worker.name} leases"] = metric(worker.url, "kindred_leases")
        return {name: count for name, count in left.items() if count}

    def settle(self):
        for worker in self.fleet.all():
            worker.wait_ready()
        end = time.monotonic() + 45  # a lease whose release failed lives for 30 s
        while (left := self.left_behind()) and time.monotonic() < end:
            time.sleep(0.5)
        for name, count in left.items():
            self.fault("left behind", f"{count:g} {name}")
        if (code := self.router.terminate(30)) != 0:
            self.fault("exit code of the router", code)

    def judge_memory(self):
        third = len(self.rss) // 3
        if third < 5:
            return
        middle, last = statistics.median(self.rss[third : 2 * third]), statistics.median(self.rss[2 * third :])
        print(f"router's memory: {self.rss[0] / 2**20:.1f} MiB at first, {middle / 2**20:.1f} in the middle third, "
              f"{last / 2**20:.1f} in the last")
        if last > middle * (1 + RSS_GROWTH_SHARE) + RSS_GROWTH_BYTES:
            self.fault("memory grows", f"{middle:.0f} to {last:.0f} bytes")

    def report(self):
        print(f"{self.options.seconds:g} s, {self.peak} requests at once at most, seed {self.options.seed}")
        for name, count in sorted(self.counts.items()):
            print(f"{count:10d}  {name}")
        if self.counts["complete"] == 0 or self.counts["kills"] + self.counts["stalls"] == 0:
            self.fault("nothing was shown", "no request completed, or nothing was broken")
        for fault in self.faults:
            print("FAULT " + fault)
        print("ok" if not self.faults else "FAILED")
        return 1 if self.faults else 0

    def stop(self):
        self.router.stop()
        self.fleet.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=1800)
    parser.add_argument("--streams", type=int, default=500, help="concurrent requests")
    parser.add_argument("--decode", type=int, default=3, help="decode workers")
    parser.add_argument("--tokens", type=int, default=36, help="longest output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, nargs=2, default=(2, 6), help="between two faults")
    parser.add_argument("--logs", type=pathlib.Path, help="keep the processes' logs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        logs = options.logs or pathlib.Path(tmp)
        logs.mkdir(parents=True, exist_ok=True)
        soak = Soak(options, logs)
        try:
            asyncio.run(soak.run())
            soak.settle()
            soak.judge_memory()
            return soak.report()
        finally:
            soak.stop()


if __name__ == "__main__":
    sys.exit(main())
