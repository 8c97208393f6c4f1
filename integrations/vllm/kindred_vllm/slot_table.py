"""The experts that each token in the KV cache was routed to, kept beside the KV: one row per KV slot.

A row lives and dies with its slot. So counts over a request's blocks are exact whatever was cached, chunked, preempted
or computed anew, and a block that is reused is simply written over. It all stays on the device; the host sees only
finished counts.
"""

from __future__ import annotations

import numpy as np
import torch

from kindred_vllm.wire import ExpertCounts


class SlotTable:
    """Not thread-safe: used by the thread that runs the model.

    Memory: slots x layers x top_k bytes (two each for 255 experts or more), and a step's ids in int32.
    """

    def __init__(
        self,
        layers: list[int],  # model layer index of each row of the counts, ascending
        experts: int,
        top_k: int,
        blocks: int,
        block_size: int,
        step_tokens: int,  # most tokens of one step, padding included
        device: torch.device | str,
    ) -> None:
        self.layers = layers
        self.experts = experts
        self.top_k = top_k
        self.block_size = block_size
        small = experts < 255
        self._unknown = 255 if small else -1
        shape = (len(layers), top_k)
        self._slots = blocks * block_size
        # The last row takes what belongs nowhere: the padding of a step.
        self._table = torch.full(
            (self._slots + 1, *shape), self._unknown, dtype=torch.uint8 if small else torch.int16, device=device
        )
        # Graphs that are captured write here, at an address that never moves.
        self._step = torch.full((step_tokens, *shape), self._unknown, dtype=torch.int32, device=device)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._table, self._step))

    def capture(self, row: int, ids: torch.Tensor) -> None:
        """The ids [tokens, top_k] that layer `row` chose for this step's tokens. Part of the forward pass."""
        self._step[: ids.shape[0], row] = ids

    def commit(self, slots: torch.Tensor) -> None:
        """Files the step's ids under the KV slots of its tokens; negative slots are padding."""
        tokens = min(slots.shape[0], self._step.shape[0])
        at = slots[:tokens].long()
        at = torch.where((at < 0) | (at >= self._slots), self._slots, at)
        self._table[at] = self._step[:tokens].to(self._table.dtype)
        # A layer that does not report next time must not be taken to have chosen the same again.
        self._step[:tokens] = self._unknown

    def forget(self, blocks: list[int]) -> None:
        """The blocks get KV that was not computed here."""
        if blocks:
            at = torch.tensor(blocks, dtype=torch.long, device=self._table.device)
            self._table[: self._slots].view(-1, self.block_size, *self._table.shape[1:])[at] = self._unknown

    def count(self, blocks: list[int], tokens: int) -> ExpertCounts | None:
        """Counts of the first `tokens` tokens in `blocks`; None if the experts of any of them are not known."""
        device = self._table.device
        position = torch.arange(tokens, device=device)
        block = torch.tensor(blocks, dtype=torch.long, device=device)
        slots = block[position // self.block_size] * self.block_size + position % self.block_size
        ids = self._table[slots].long()  # [tokens, layers, top_k]
        # One column more for what is unknown, so that one copy to the host tells both.
        ids = torch.where((ids == self._unknown) | (ids < 0) | (ids >= self.experts), self.experts, ids)
        flat = ids.permute(1, 0, 2).reshape(len(self.layers), tokens * self.top_k)
        counts = torch.zeros((len(self.layers), self.experts + 1), dtype=torch.int32, device=device)
        counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.int32))
        host: np.ndarray = counts.cpu().numpy()
        if host[:, self.experts].any():
            return None
        return ExpertCounts(self.layers, self.top_k, tokens, host[:, : self.experts])
