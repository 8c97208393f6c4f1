from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


class Spec:
    block_size = 4


FullAttentionSpec = type("FullAttentionSpec", (Spec,), {})
SlidingWindowSpec = type("SlidingWindowSpec", (Spec,), {})


def kv_config(*specs: type[Spec], blocks: int = 8) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec(), layer_names=[f"attention{i}"]) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=blocks)


@pytest.fixture
def cache() -> Any:
    """A KV cache whose second group keeps every token."""
    return kv_config(SlidingWindowSpec, FullAttentionSpec)
