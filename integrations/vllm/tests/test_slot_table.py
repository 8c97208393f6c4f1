from __future__ import annotations

import numpy as np
import pytest
import torch

from kindred_vllm.slot_table import SlotTable

LAYERS, EXPERTS, TOP_K, BLOCK = [1, 2, 5], 6, 2, 4


def make(blocks: int = 8, experts: int = EXPERTS) -> SlotTable:
    return SlotTable(LAYERS, experts, TOP_K, blocks, BLOCK, step_tokens=16, device="cpu")


def choose(tokens: int, generator: torch.Generator, experts: int = EXPERTS) -> torch.Tensor:
    """Ids [tokens, layers, top_k], different within a token."""
    return torch.rand((tokens, len(LAYERS), experts), generator=generator).topk(TOP_K, dim=-1).indices


def run_step(table: SlotTable, ids: torch.Tensor, slots: list[int], padding: int = 0) -> None:
    padded = torch.cat([ids, torch.zeros((padding, *ids.shape[1:]), dtype=ids.dtype)])
    for row in range(len(LAYERS)):
        table.capture(row, padded[:, row])
    table.commit(torch.tensor(slots + [-1] * padding))


def slots_of(blocks: list[int], start: int, end: int) -> list[int]:
    return [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]


def by_hand(ids: torch.Tensor, experts: int = EXPERTS) -> list[list[int]]:
    return [np.bincount(ids[:, row].reshape(-1).numpy(), minlength=experts).tolist() for row in range(ids.shape[1])]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("experts", [6, 255, 384])
def test_chunks_and_other_requests_in_the_batch(generator: torch.Generator, experts: int) -> None:
    table = make(experts=experts)
    mine, other = choose(11, generator, experts), choose(9, generator, experts)
    run_step(table, torch.cat([other[:5], mine[:7]]), slots_of([6, 1, 0], 0, 5) + slots_of([3, 7, 2], 0, 7))
    run_step(table, torch.cat([mine[7:], other[5:]]), slots_of([3, 7, 2], 7, 11) + slots_of([6, 1, 0], 5, 9), padding=3)
    for ids, blocks in ((mine, [3, 7, 2]), (other, [6, 1, 0])):
        counts = table.count(blocks, len(ids))
        assert counts is not None
        assert counts.problem() is None
        assert counts.data.tolist() == by_hand(ids, experts)


def test_a_cached_prefix_counts_though_it_is_not_computed_again(generator: torch.Generator) -> None:
    table = make()
    prefix, first, second = choose(8, generator), choose(3, generator), choose(2, generator)
    run_step(table, torch.cat([prefix, first]), slots_of([0, 1, 2], 0, 11))
    run_step(table, second, slots_of([0, 1, 3], 8, 10))
    counts = table.count([0, 1, 3], 10)
    assert counts is not None
    assert counts.data.tolist() == by_hand(torch.cat([prefix, second]))


def test_a_reused_block_has_only_its_new_tokens(generator: torch.Generator) -> None:
    table = make()
    run_step(table, choose(4, generator), slots_of([5], 0, 4))
    again = choose(3, generator)
    run_step(table, again, slots_of([5], 0, 3))
    counts = table.count([5], 3)
    assert counts is not None
    assert counts.data.tolist() == by_hand(again)


def test_generated_tokens_do_not_count(generator: torch.Generator) -> None:
    table = make()
    prompt = choose(5, generator)
    run_step(table, prompt, slots_of([0, 1], 0, 5))
    run_step(table, choose(2, generator), slots_of([0, 1], 5, 7))  # a sampled and a drafted token
    counts = table.count([0, 1], 5)
    assert counts is not None
    assert counts.data.tolist() == by_hand(prompt)


def test_tokens_of_unknown_experts_give_no_counts(generator: torch.Generator) -> None:
    table = make()
    assert table.count([0], 1) is None  # never computed
    run_step(table, choose(8, generator), slots_of([0, 1], 0, 8))
    table.forget([1])  # a transfer
    assert table.count([0, 1], 8) is None
    assert table.count([0], 4) is not None


def test_a_layer_that_fell_silent_gives_no_counts(generator: torch.Generator) -> None:
    table = make()
    run_step(table, choose(4, generator), slots_of([0], 0, 4))
    ids = choose(4, generator)
    table.capture(0, ids[:, 0])
    table.capture(2, ids[:, 2])
    table.commit(torch.tensor(slots_of([1], 0, 4)))
    assert table.count([1], 4) is None
    assert table.count([0], 4) is not None


def test_graphs_find_their_buffer_where_it_was(generator: torch.Generator) -> None:
    """What a CUDA graph has recorded is a copy from one address to another: it is replayed without our code."""
    table = make()
    padded = 8
    ids = torch.zeros((len(LAYERS), padded, TOP_K), dtype=torch.int64)  # where the model's graph leaves its choice
    for row in range(len(LAYERS)):
        table.capture(row, ids[row])
    at = table._step.data_ptr()
    targets = [table._step[:padded, row] for row in range(len(LAYERS))]
    for block in (3, 1):
        chosen = choose(4, generator)
        ids[:, :4] = chosen.permute(1, 0, 2)
        for row, target in enumerate(targets):
            target.copy_(ids[row])  # the replay
        table.commit(torch.tensor(slots_of([block], 0, 4) + [-1] * (padded - 4)))
        counts = table.count([block], 4)
        assert counts is not None
        assert counts.data.tolist() == by_hand(chosen)
    assert table._step.data_ptr() == at


def test_slots_out_of_range_touch_nothing(generator: torch.Generator) -> None:
    table = make(blocks=2)
    kept = choose(8, generator)
    run_step(table, kept, slots_of([0, 1], 0, 8))
    run_step(table, choose(2, generator), [8, 1000])
    counts = table.count([0, 1], 8)
    assert counts is not None
    assert counts.data.tolist() == by_hand(kept)
