"""What the scheduler asks of the workers in a step: which requests' prompts are complete with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Orders:
    """Travels with the KV connector's metadata of a step."""

    # Requests whose prompt is complete with this step: their blocks and prompt tokens.
    count: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    forget: list[int] = field(default_factory=list)  # blocks whose KV comes from elsewhere
    prompt_tokens: int = 0  # of the step; the experts of the others are nobody's business


@dataclass
class _Prompt:
    tokens: int
    blocks: list[int] = field(default_factory=list)


class PromptBook:
    """Follows the blocks of the requests whose counts are wanted, in the scheduler's process.

    `group`: the KV cache group whose blocks hold every token of a prompt.
    """

    def __init__(self, group: int, block_size: int) -> None:
        self._group = group
        self._block_size = block_size
        self._prompts: dict[str, _Prompt] = {}
        self._forget: list[int] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    def follow(self, request_id: str, prompt_tokens: int) -> None:
        self._prompts[request_id] = _Prompt(prompt_tokens)

    def drop(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def loaded(self, blocks: list[int]) -> None:
        """These blocks are filled by a transfer."""
        self._forget.extend(blocks)

    def orders(self, scheduler_output: Any) -> Orders:
        """To be called once for each step, with vLLM's SchedulerOutput."""
        out = Orders(forget=self._forget)
        self._forget = []
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._schedule(out, new.req_id, new.block_ids, True, new.num_computed_tokens, scheduled)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._schedule(out, request_id, blocks, request_id in cached.resumed_req_ids, computed, scheduled)
        return out

    def _schedule(
        self,
        out: Orders,
        request_id: str,
        blocks: tuple[list[int], ...] | None,
        whole: bool,  # `blocks` are all that it has, not only the new ones
        computed: int,
        scheduled: dict[str, int],
    ) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        if blocks is not None:
            of_group = list(blocks[self._group])
            prompt.blocks = of_group if whole else prompt.blocks + of_group
        reached = computed + scheduled.get(request_id, 0)
        if computed >= prompt.tokens:
            return
        out.prompt_tokens += min(reached, prompt.tokens) - computed
        if reached >= prompt.tokens:
            needed = -(-prompt.tokens // self._block_size)
            out.count[request_id] = (prompt.blocks[:needed], prompt.tokens)
