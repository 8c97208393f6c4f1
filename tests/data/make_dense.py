"""Makes dense.gguf: a tiny model without experts (random weights, the bundled model's vocabulary).

Needs the `gguf` package from PyPI. usage: python tests/data/make_dense.py
"""

import pathlib

import gguf
import numpy as np

WIDTH, FFN, LAYERS, HEADS = 32, 64, 2, 2
HERE = pathlib.Path(__file__).parent

source = gguf.GGUFReader(HERE.parent.parent / "models/kindred-tiny-moe-q8_0.gguf")
tokens = source.fields["tokenizer.ggml.tokens"].contents()
writer = gguf.GGUFWriter(HERE / "dense.gguf", "llama")
writer.add_name("dense")
writer.add_context_length(256)
writer.add_embedding_length(WIDTH)
writer.add_block_count(LAYERS)
writer.add_feed_forward_length(FFN)
writer.add_head_count(HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(len(tokens))
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("gpt-2")
writer.add_token_list(tokens)
writer.add_token_types(source.fields["tokenizer.ggml.token_type"].contents())
writer.add_token_merges(source.fields["tokenizer.ggml.merges"].contents())
writer.add_eos_token_id(source.fields["tokenizer.ggml.eos_token_id"].contents())

random = np.random.default_rng(11)


def add(name, *shape):
    values = random.uniform(-0.5, 0.5, shape) if len(shape) > 1 else np.ones(shape)
    writer.add_tensor(name + ".weight", values.astype(np.float16 if len(shape) > 1 else np.float32))


add("token_embd", len(tokens), WIDTH)
add("output_norm", WIDTH)
for layer in range(LAYERS):
    add(f"blk.{layer}.attn_norm", WIDTH)
    add(f"blk.{layer}.ffn_norm", WIDTH)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.{layer}.{name}", WIDTH, WIDTH)
    add(f"blk.{layer}.ffn_gate", FFN, WIDTH)
    add(f"blk.{layer}.ffn_up", FFN, WIDTH)
    add(f"blk.{layer}.ffn_down", WIDTH, FFN)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
