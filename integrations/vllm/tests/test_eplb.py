from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.distributed.eplb import eplb_state, policy
from vllm.distributed.eplb.policy import DefaultEplbPolicy

from kindred_vllm import eplb
from kindred_vllm.eplb import KindredEplbPolicy

EXPERTS, SLOTS, RANKS, LAYERS = 32, 40, 8, 6


@pytest.fixture
def weight() -> torch.Tensor:
    generator = np.random.default_rng(1)
    return torch.from_numpy(generator.zipf(1.3, (LAYERS, EXPERTS)).clip(1, 4000))


def busiest(placed: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """[layers] load of the busiest rank over the mean, when an expert's copies share its load evenly."""
    out = []
    for row, load in zip(placed.numpy(), weight.numpy().astype(float), strict=True):
        share = load / np.bincount(row, minlength=EXPERTS)
        ranks = share[row].reshape(RANKS, -1).sum(axis=1)
        out.append(ranks.max() / ranks.mean())
    return np.array(out)


def rebalance(weight: torch.Tensor, old: torch.Tensor | None = None) -> torch.Tensor:
    return KindredEplbPolicy.rebalance_experts(weight, SLOTS, 1, 1, RANKS, old)


def test_every_expert_has_a_slot_and_no_rank_is_busier_than_with_vllms_policy(weight: torch.Tensor) -> None:
    placed = rebalance(weight)
    assert placed.shape == (LAYERS, SLOTS)
    assert all(set(row.tolist()) == set(range(EXPERTS)) for row in placed)
    theirs = DefaultEplbPolicy.rebalance_experts(weight, SLOTS, 1, 1, RANKS)
    # Whoever is within SLACK of the least loaded rank counts as equal, once for each of its slots at most.
    assert (busiest(placed, weight) <= busiest(theirs, weight) + eplb.SLACK * SLOTS / RANKS).all()


def test_the_same_load_moves_nothing(weight: torch.Tensor) -> None:
    placed = rebalance(weight)
    assert torch.equal(rebalance(weight, placed), placed)


def test_experts_stand_near_the_ranks_that_want_them() -> None:
    load = torch.full((1, EXPERTS), 80)
    sources = np.zeros((RANKS, 1, EXPERTS))
    wanted_by = np.random.default_rng(2).permutation(np.repeat(np.arange(RANKS), EXPERTS // RANKS))
    sources[wanted_by, 0, np.arange(EXPERTS)] = 80
    placed = {}
    for name, gathered in (("blind", []), ("aware", [sources])):
        KindredEplbPolicy.gathered = gathered
        placed[name] = KindredEplbPolicy.rebalance_experts(load, EXPERTS, 1, 1, RANKS)
    KindredEplbPolicy.gathered = []
    per_rank = EXPERTS // RANKS
    near = {name: int((wanted_by[p[0].numpy()] == np.arange(EXPERTS) // per_rank).sum()) for name, p in placed.items()}
    assert near["aware"] >= EXPERTS - 2  # exchanges in pairs may stop short of the best
    assert near["blind"] < EXPERTS // 2


def test_nearness_costs_no_balance(weight: torch.Tensor) -> None:
    blind = rebalance(weight)
    load = weight.numpy().astype(float)
    split = np.random.default_rng(3).dirichlet(np.ones(RANKS), size=load.shape)  # [layers, experts, ranks]
    KindredEplbPolicy.gathered = [np.moveaxis(split, -1, 0) * load]
    KindredEplbPolicy.gathered[0][0] += load - KindredEplbPolicy.gathered[0].sum(axis=0)
    aware = rebalance(weight)
    KindredEplbPolicy.gathered = []
    assert all(set(row.tolist()) == set(range(EXPERTS)) for row in aware)
    assert (busiest(aware, weight) <= busiest(blind, weight) + eplb.SLACK * SLOTS / RANKS).all()


def test_sources_of_another_model_are_not_taken(weight: torch.Tensor) -> None:
    load = weight.numpy().astype(float)
    fitting = np.zeros((RANKS, LAYERS, EXPERTS))
    fitting[3] = load
    KindredEplbPolicy.gathered = [fitting + 1, fitting]
    found = KindredEplbPolicy._sources_of(load, RANKS)
    KindredEplbPolicy.gathered = []
    assert found is not None
    assert np.array_equal(found, fitting)


def test_it_takes_the_place_of_vllms_policy_and_sees_counts_before_they_are_added_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setitem(policy.EPLB_POLICIES, "default", DefaultEplbPolicy)
    monkeypatch.setattr(eplb_state.EplbState, "_allreduce_list", eplb_state.EplbState._allreduce_list)
    eplb.install()
    eplb.install()
    assert policy.EPLB_POLICIES["default"] is KindredEplbPolicy
    assert eplb_state.EPLB_POLICIES["default"] is KindredEplbPolicy
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = torch.distributed.group.WORLD
        monkeypatch.setattr(eplb_state, "get_ep_group", lambda: type("Group", (), {"device_group": world}))
        state = object.__new__(eplb_state.EplbState)
        tensor = torch.arange(6).reshape(2, 3)
        assert torch.equal(state._allreduce_list([tensor])[0], tensor)
        assert KindredEplbPolicy.gathered[0].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    finally:
        torch.distributed.destroy_process_group()
        KindredEplbPolicy.gathered = []
