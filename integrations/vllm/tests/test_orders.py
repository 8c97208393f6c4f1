from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kindred_vllm.orders import PromptBook

BLOCK = 4


def step(
    new: dict[str, tuple[list[int], int, int]] | None = None,  # blocks, computed, scheduled
    cached: dict[str, tuple[list[int] | None, int, int]] | None = None,
    resumed: set[str] | None = None,
) -> Any:
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: row[2] for name, row in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=([99], blocks), num_computed_tokens=computed)
            for name, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[None if row[0] is None else ([98], row[0]) for row in cached.values()],
            num_computed_tokens=[row[1] for row in cached.values()],
            resumed_req_ids=resumed or set(),
        ),
    )


def book() -> PromptBook:
    return PromptBook(group=1, block_size=BLOCK)


def test_a_prompt_in_chunks_is_counted_once_it_is_complete() -> None:
    prompts = book()
    prompts.follow("a", 10)
    first = prompts.orders(step(new={"a": ([5, 6], 0, 8)}))
    assert (first.count, first.prompt_tokens) == ({}, 8)
    last = prompts.orders(step(cached={"a": ([2], 8, 2)}))
    assert (last.count, last.prompt_tokens) == ({"a": ([5, 6, 2], 10)}, 2)
    generating = prompts.orders(step(cached={"a": (None, 10, 1)}))
    assert (generating.count, generating.prompt_tokens) == ({}, 0)


def test_a_prefix_hit_starts_in_the_middle_and_spare_blocks_are_left_out() -> None:
    prompts = book()
    prompts.follow("a", 9)
    assert prompts.orders(step(new={"a": ([0, 1, 7, 8], 8, 1)})).count == {"a": ([0, 1, 7], 9)}


def test_a_preempted_request_starts_over_with_its_new_blocks() -> None:
    prompts = book()
    prompts.follow("a", 8)
    prompts.orders(step(new={"a": ([0], 0, 4)}))
    assert prompts.orders(step(cached={"a": ([3, 4], 0, 8)}, resumed={"a"})).count == {"a": ([3, 4], 8)}
    prompts.follow("b", 8)
    prompts.orders(step(new={"b": ([5], 0, 4)}))
    # The newer model runner gets it as a new one.
    assert prompts.orders(step(new={"b": ([6, 7], 0, 8)})).count == {"b": ([6, 7], 8)}


def test_requests_that_nobody_asked_about_are_left_alone() -> None:
    prompts = book()
    prompts.follow("a", 4)
    prompts.drop("a")
    assert prompts.orders(step(new={"a": ([0], 0, 4), "b": ([1], 0, 4)})).count == {}


def test_blocks_filled_by_a_transfer_are_forgotten_once() -> None:
    prompts = book()
    prompts.loaded([3, 4])
    assert prompts.orders(step()).forget == [3, 4]
    assert prompts.orders(step()).forget == []
