"""A second pair of eyes inside vLLM, for the test: what the gates say, seen by forward hooks of their own.

    --worker-extension-cls hook.GateHook     and, over /collective_rpc, kindred_watch and kindred_take

Nothing of the plugin is used: experts are chosen here from the gates' logits.
"""

from __future__ import annotations

from typing import Any

import torch


class GateHook:
    def kindred_watch(self) -> dict[str, int]:
        self._seen: dict[int, torch.Tensor] = {}
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        config = self.model_config.hf_text_config  # type: ignore[attr-defined]
        gates = [(name, module) for name, module in model.named_modules() if name.endswith("mlp.gate")]
        for name, gate in gates:
            layer = int(name.split(".layers.")[1].split(".")[0])
            gate.register_forward_hook(self._hook(layer, config.num_experts_per_tok))
        return {"gates": len(gates)}

    def _hook(self, layer: int, top_k: int) -> Any:
        def seen(_module: Any, _inputs: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            chosen = logits.float().topk(top_k, dim=-1).indices
            counts = torch.bincount(chosen.reshape(-1), minlength=logits.shape[-1])
            self._seen[layer] = counts + self._seen.get(layer, 0)

        return seen

    def kindred_take(self) -> dict[str, list[int]]:
        """Counts of each layer since the last call."""
        out = {str(layer): counts.tolist() for layer, counts in sorted(self._seen.items())}
        self._seen.clear()
        return out
