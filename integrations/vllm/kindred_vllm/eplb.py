"""EXPERIMENTAL: Kindred's placement as vLLM's EPLB policy. KINDRED_VLLM_EPLB=1 turns it on, beside --enable-eplb.

vLLM balances what each rank's experts compute. This policy does as well, and among placements that are equally even it
takes the one that has experts near the ranks whose tokens want them and that moves few weights. Whose tokens they are
is lost in vLLM's all-reduce, so each rank's own counts are gathered just before it.

vLLM refuses EPLB on CPUs. Tested against vLLM's modules there; on GPUs only by hand: gpu_check/.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import vllm
from vllm.distributed.eplb import eplb_state, policy
from vllm.distributed.eplb.policy import AbstractEplbPolicy
from vllm.logger import init_logger

from kindred_vllm import versions

logger = init_logger("vllm.kindred")

SLACK = 0.02  # of a rank's mean load: who is within it of the least loaded is as good


def copies_of(load: np.ndarray, slots: int) -> np.ndarray:
    """[experts] copies of each expert, `slots` in all: each further one goes where a copy has most to do."""
    copies = np.ones(len(load), dtype=np.int64)
    for _ in range(slots - len(load)):
        copies[np.argmax(load / copies)] += 1
    return copies


def place_layer(load: np.ndarray, sources: np.ndarray | None, slots: int, ranks: int, old: np.ndarray) -> np.ndarray:
    """[slots] expert of each slot; rank r has the slots from r * slots / ranks on.

    load [experts]; sources [ranks, experts] tokens that each rank sends to each expert, or None; old [slots], -1 for a
    slot that was empty. Heaviest copies first, each to a rank with room that has no copy yet, if there is one.
    """
    per_rank = slots // ranks
    copies = copies_of(load, slots)
    share = load / copies
    order = sorted(range(len(load)), key=lambda expert: (-share[expert], expert))
    had = [set(old[r * per_rank : (r + 1) * per_rank].tolist()) for r in range(ranks)]
    slack = SLACK * load.sum() / ranks
    loads = np.zeros(ranks)
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for expert in order:
        for _ in range(int(copies[expert])):
            room = [r for r in range(ranks) if len(chosen[r]) < per_rank]
            without = [r for r in room if expert not in chosen[r]]
            among = without or room
            least = min(loads[r] for r in among)
            near = [r for r in among if loads[r] <= least + slack]
            rank = min(
                near,
                key=lambda r: (
                    expert not in had[r],
                    0.0 if sources is None else -float(sources[r, expert]),
                    loads[r],
                    r,
                ),
            )
            chosen[rank].append(expert)
            loads[rank] += share[expert]
    if sources is not None:
        _draw_near(chosen, share, loads, sources)
    return np.concatenate([_keep_slots(chosen[r], old[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)])


def _draw_near(chosen: list[list[int]], share: np.ndarray, loads: np.ndarray, sources: np.ndarray) -> None:
    """Exchanges pairs of experts between ranks while that brings tokens nearer and makes no rank the busiest."""
    most = loads.max() + 1e-9
    pairs = [(a, b) for a in range(len(chosen)) for b in range(a)]
    for _ in range(len(chosen)):  # passes; few are needed
        before = [list(experts) for experts in chosen]
        for a, b in pairs:
            # [slot of a, slot of b]: what the exchange brings, and by how much it shifts load from a to b.
            mine, yours = np.array(chosen[a]), np.array(chosen[b])
            gain = (sources[b, mine] - sources[a, mine])[:, None] + (sources[a, yours] - sources[b, yours])[None, :]
            shift = share[mine][:, None] - share[yours][None, :]
            allowed = (loads[b] + shift <= most) & (loads[a] - shift <= most)
            allowed &= ~np.isin(mine, yours)[:, None] & ~np.isin(yours, mine)[None, :]
            gain = np.where(allowed, gain, 0.0)
            i, j = np.unravel_index(int(np.argmax(gain)), gain.shape)
            if gain[i, j] > 0:
                loads[a] -= shift[i, j]
                loads[b] += shift[i, j]
                chosen[a][i], chosen[b][j] = int(yours[j]), int(mine[i])
        if chosen == before:
            return


def _keep_slots(experts: list[int], old: np.ndarray) -> np.ndarray:
    """A rank's experts in the slots where they were, the new ones in what is free."""
    out = np.full(len(old), -1, dtype=np.int64)
    left = list(experts)
    for slot, expert in enumerate(old.tolist()):
        if expert in left:
            left.remove(expert)
            out[slot] = expert
    out[out == -1] = left
    return out


class KindredEplbPolicy(AbstractEplbPolicy):
    # Of the last all-reduce: for each model [ranks, layers, experts]. Set and read by vLLM's one EPLB thread.
    gathered: ClassVar[list[np.ndarray]] = []

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        load = weight.float().cpu().numpy().astype(np.float64)
        layers = load.shape[0]
        sources = cls._sources_of(load, num_ranks)
        if old_global_expert_indices is None or old_global_expert_indices.shape[1] != num_replicas:
            old = np.full((layers, num_replicas), -1, dtype=np.int64)
        else:
            old = old_global_expert_indices.cpu().numpy()
        placed = [
            place_layer(load[i], None if sources is None else sources[:, i], num_replicas, num_ranks, old[i])
            for i in range(layers)
        ]
        return torch.from_numpy(np.stack(placed)).to(weight.device)

    @classmethod
    def _sources_of(cls, load: np.ndarray, ranks: int) -> np.ndarray | None:
        """Those whose sum is this load: a draft model has others, and the policy is not told which it serves."""
        for one in cls.gathered:
            if one.shape == (ranks, *load.shape) and np.array_equal(one.sum(axis=0), load):
                return one
        return None


def _gather(tensors: list[torch.Tensor], group: Any) -> list[np.ndarray]:
    ranks = torch.distributed.get_world_size(group)
    out = []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        out.append(torch.stack(parts).cpu().numpy().astype(np.float64))
    return out


def install() -> None:
    """Puts the policy in the place of vLLM's default one. Twice does no harm."""
    versions.check(vllm.__version__)
    if policy.EPLB_POLICIES["default"] is KindredEplbPolicy:
        return
    original = versions.eplb_allreduce(eplb_state.EplbState)
    policy.EPLB_POLICIES["default"] = KindredEplbPolicy

    def allreduce(self: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        KindredEplbPolicy.gathered = _gather(tensors, eplb_state.get_ep_group().device_group)
        return original(self, tensors)

    setattr(eplb_state.EplbState, versions.EPLB_ALLREDUCE, allreduce)
    logger.warning("kindred: EXPERIMENTAL: experts are placed by Kindred's policy, near the ranks that want them")
