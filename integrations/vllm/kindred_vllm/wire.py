"""Expert counts as routers read them (Kindred's src/expert/counts.h)."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_IN_U16 = 65535


@dataclass
class ExpertCounts:
    """How often each expert of each MoE layer was selected for a request's prompt tokens."""

    layers: list[int]  # model layer index of each row, ascending
    top_k: int
    tokens: int
    data: np.ndarray  # [layers, experts], whole numbers

    def problem(self) -> str | None:
        """What keeps routers from using these counts, or None."""
        if self.tokens == 0 or len(self.layers) == 0:
            return "no tokens or no layers"
        if (self.data.sum(axis=1) != self.tokens * self.top_k).any():
            return "rows do not sum to tokens x top_k"
        # The experts of a token differ from each other. What only pretends to route says 0, 0, 0, 0.
        if int(self.data.max()) > self.tokens:
            return "an expert was selected more often than there are tokens"
        return None

    def to_json(self) -> dict[str, Any]:
        dtype = "u16" if self.tokens <= MOST_IN_U16 else "u32"
        little_endian = self.data.astype("<u2" if dtype == "u16" else "<u4")
        return {
            "v": 1,
            "dtype": dtype,
            "layers": list(self.layers),
            "experts": int(self.data.shape[1]),
            "top_k": self.top_k,
            "tokens": self.tokens,
            "data": base64.b64encode(little_endian.tobytes()).decode("ascii"),
        }


def merge(parts: list[ExpertCounts]) -> ExpertCounts:
    """One request's counts from pipeline stages, each of which has other layers."""
    rows = sorted(
        ((layer, row) for part in parts for layer, row in zip(part.layers, part.data, strict=True)),
        key=lambda pair: pair[0],
    )
    return ExpertCounts(
        layers=[layer for layer, _ in rows],
        top_k=parts[0].top_k,
        tokens=parts[0].tokens,
        data=np.stack([row for _, row in rows]),
    )
