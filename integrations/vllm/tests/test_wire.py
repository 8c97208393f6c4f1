from __future__ import annotations

import base64

import numpy as np

from kindred_vllm.wire import ExpertCounts, merge


def counts(layers: list[int], rows: list[list[int]], tokens: int, top_k: int = 2) -> ExpertCounts:
    return ExpertCounts(layers, top_k, tokens, np.array(rows, dtype=np.int32))


def test_wire_form_is_what_the_router_reads() -> None:
    wire = counts([0, 3], [[2, 1, 1], [0, 2, 2]], tokens=2).to_json()
    assert {k: v for k, v in wire.items() if k != "data"} == {
        "v": 1,
        "dtype": "u16",
        "layers": [0, 3],
        "experts": 3,
        "top_k": 2,
        "tokens": 2,
    }
    assert base64.b64decode(wire["data"]) == bytes([2, 0, 1, 0, 1, 0, 0, 0, 2, 0, 2, 0])


def test_long_prompts_need_wider_numbers() -> None:
    assert counts([0], [[65535, 65535]], tokens=65535).to_json()["dtype"] == "u16"
    wide = counts([0], [[65536, 65536]], tokens=65536).to_json()
    assert wide["dtype"] == "u32"
    assert len(base64.b64decode(wide["data"])) == 8


def test_problems_are_found() -> None:
    assert counts([0], [[2, 1, 1]], tokens=2).problem() is None
    assert "sum" in str(counts([0, 1], [[2, 1, 1], [2, 1, 0]], tokens=2).problem())
    # What a kernel that never wrote its buffer looks like: every choice is expert 0.
    assert "more often" in str(counts([0], [[4, 0, 0]], tokens=2).problem())
    assert "no tokens" in str(counts([0], [[0, 0, 0]], tokens=0).problem())


def test_stages_of_a_pipeline_are_merged_by_layer() -> None:
    whole = merge([counts([4, 5], [[2, 2], [3, 1]], 2), counts([0], [[1, 3]], 2)])
    assert whole.layers == [0, 4, 5]
    assert whole.data.tolist() == [[1, 3], [2, 2], [3, 1]]
