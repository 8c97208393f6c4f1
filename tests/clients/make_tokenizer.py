"""usage: make_tokenizer.py FOLDER: a byte-level BPE tokenizer in Hugging Face's form, of the bundled prompts."""

import json
import pathlib
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
texts = [str(path) for path in sorted((ROOT / "data/prompts").rglob("*")) if path.is_file()]
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train(texts, trainers.BpeTrainer(vocab_size=2048, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False))
tokenizer.save(str(folder / "tokenizer.json"))
about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>",
         "model_max_length": 4096, "chat_template": TEMPLATE}
(folder / "tokenizer_config.json").write_text(json.dumps(about))
