"""Writes the bundled GGUF model as a Hugging Face one, for vLLM: the same weights, dequantised.

usage: hf_model.py MODEL.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ARCHITECTURE = "qwen3moe"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
CONTROL = 3  # token type


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def model(self, name: str) -> Any:
        value = self.get(f"{ARCHITECTURE}.{name}")
        if value is None:
            raise SystemExit(f"the GGUF file has no {ARCHITECTURE}.{name}")
        return value


def model_config(meta: Metadata, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "float32",
        "vocab_size": len(meta.get("tokenizer.ggml.tokens")),
        "hidden_size": meta.model("embedding_length"),
        "intermediate_size": meta.model("feed_forward_length"),
        "moe_intermediate_size": meta.model("expert_feed_forward_length"),
        "num_hidden_layers": meta.model("block_count"),
        "num_attention_heads": meta.model("attention.head_count"),
        "num_key_value_heads": meta.model("attention.head_count_kv"),
        "head_dim": meta.model("attention.key_length"),
        "num_experts": meta.model("expert_count"),
        "num_experts_per_tok": meta.model("expert_used_count"),
        "max_position_embeddings": meta.model("context_length"),
        "rms_norm_eps": float(meta.model("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(meta.model("rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", 0),
    }


def weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        data = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] != "blk":
            out[f"{OUTER[parts[0]]}.weight"] = data
            continue
        layer = f"model.layers.{parts[1]}"
        if parts[2] in OF_LAYER:
            out[f"{layer}.{OF_LAYER[parts[2]]}.weight"] = data
            continue
        for expert, matrix in enumerate(data):
            out[f"{layer}.mlp.experts.{expert}.{OF_EXPERTS[parts[2]]}.weight"] = matrix.clone()
    return out


def write_tokenizer(meta: Metadata, folder: Path) -> None:
    tokens: list[str] = meta.get("tokenizer.ggml.tokens")
    kinds: list[int] = meta.get("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in meta.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": tokens[meta.get("tokenizer.ggml.eos_token_id")],
                "pad_token": tokens[meta.get("tokenizer.ggml.padding_token_id", 0)],
                "model_max_length": meta.model("context_length"),
                "chat_template": meta.get("tokenizer.chat_template"),
            }
        )
    )


def main(source: Path, folder: Path) -> None:
    reader = GGUFReader(str(source))
    meta = Metadata(reader)
    if meta.get("general.architecture") != ARCHITECTURE:
        raise SystemExit(f"{source} is no {ARCHITECTURE} model")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(reader)
    (folder / "config.json").write_text(json.dumps(model_config(meta, "lm_head.weight" not in tensors), indent=1))
    write_tokenizer(meta, folder)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
