import pytest

from cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """One prefill and two decode workers behind a router, and one worker that does both."""
    with Cluster(tmp_path_factory.mktemp("cluster"), both=1, worker_args=["--context-tokens", 1024]) as running:
        yield running
