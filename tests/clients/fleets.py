"""What the clients run against: `kindred router`, and behind it either one kind of workers that do whole requests
("plain"), or prefill and decode workers ("apart")."""

import contextlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from cluster import MODEL, Cluster, Server  # noqa: E402
from scripted_engine import ScriptedEngine  # noqa: E402
from test_simulate_serve import mock_fleet  # noqa: E402

MODES = ("plain", "apart")


@contextlib.contextmanager
def text_fleet(tmp, mode):
    """Embedded workers with the bundled model: real text."""
    small = ["--context-tokens", 1024]
    if mode == "apart":
        with Cluster(tmp, prefill=1, decode=2, worker_args=small) as cluster:
            yield cluster.url
        return
    with contextlib.ExitStack() as ending:
        worker = Server("worker", "--model", MODEL, "--threads", 1, *small, log=tmp / "worker.log")
        ending.callback(worker.stop)
        worker.wait_ready()
        yield start_router(ending, tmp / "router.log", "--worker", worker.url)


@contextlib.contextmanager
def engine_fleet(tmp, mode):
    """Scripted engines with tools, structured output, reasoning, Responses and Messages, which speak as vLLM does."""
    roles = ["worker"] if mode == "plain" else ["prefill", "decode"]
    with contextlib.ExitStack() as ending:
        urls = [arg for role in roles for arg in (f"--{role}", ending.enter_context(ScriptedEngine()).url)]
        # Their broken streams are what is tried.
        yield start_router(ending, tmp / "engine_router.log", *urls, "--failures-until-out", 1000)


@contextlib.contextmanager
def load_fleet(tmp, mode):
    """Simulated workers in real time, which are fast enough for a load generator."""
    workers, dialect = ("2B", "openai") if mode == "plain" else ("1P2D", "kindred")
    with mock_fleet(tmp, workers, "--dialect", dialect) as (router, _):
        yield router.url


def start_router(ending, log, *args):
    router = Server("router", *args, "--health-interval-ms", 200, log=log)
    ending.callback(router.stop)
    return router.wait_ready("/ready").url
