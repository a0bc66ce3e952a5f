"""A small world in which the cookbook's unmodified recipes find model, tokenizer and data offline.

The recipes load ``Qwen/Qwen3-8B-Base``, ``openai/gsm8k`` and ``HuggingFaceH4/no_robots`` from the hub; in a folder that
has directories of these names, transformers and datasets take the directories. The questions ask for a digit, which
the model names at random: only the reward, or the data, says which one it is.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilth.config.schema import LoraConfig
from tilth.data.tokenizer import Tokenizer
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.serve.tinker.wire import Datum
from tilth.serve.tinker.worker import AdamStep, ModelSpec, SharedBase, TrainedModel

NAME = "Qwen/Qwen3-8B-Base"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
PREFIX = (
    "User: How many r's are in strawberry?" + SUFFIX + "\n\nAssistant: Let's spell the word out and number all the "
    "letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
SPREAD = 8.0
"""Factor on initial embeddings: adapters leave them alone, so those of digits must differ from the start."""
DIGIT = 7
"""Answer to every question."""


def question(number: int) -> str:
    """Return one of a hundred questions."""
    return f"Which digit does box {number} hold?"


def text(number: int, answer: int) -> tuple[str, str]:
    """Return prompt and answer as the recipe's renderer of base models writes them."""
    return f"{PREFIX}\n\nUser: {question(number)}{SUFFIX}\n\nAssistant:", f" \\boxed{{{answer}}}\n\nUser:"


def make_world(folder: Path, *, steps: int = 60, questions: int = 512) -> Path:
    """Make model and data below a folder; return the model's directory."""
    rng = random.Random(0)
    tokenizer = Tokenizer.train([a + b for d in range(100) for a, b in [text(d, d % 10)]], 400)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
    }
    config = DecoderConfig(tokenizer.vocab_size, **sizes, family="qwen3", qk_norm=True, max_positions=512)
    model = Decoder(config)
    model.init_weights_(0)
    with torch.no_grad():
        model.head_weight.mul_(SPREAD)
    trained = TrainedModel(SharedBase(config, dict(model.named_parameters())), ModelSpec(LoraConfig(rank=0), 0))
    for step in range(steps):
        data = [_example(tokenizer, rng) for _ in range(16)]
        trained.forward_backward(data, "cross_entropy", {}, forward_only=False)
        trained.step(AdamStep(3e-3 * (1 - step / steps), (0.9, 0.95), 1e-8, 0.0, 1.0))
    save_pretrained(folder / NAME, config, trained.weights(), tokenizer=tokenizer)
    _dataset(folder / "openai/gsm8k", "main", [_problem(rng.randrange(100)) for _ in range(questions)])
    _dataset(folder / "HuggingFaceH4/no_robots", "default", [_talk(rng.randrange(100)) for _ in range(questions)])
    return folder / NAME


def _example(tokenizer: Tokenizer, rng: random.Random) -> Datum:
    prompt, answer = text(rng.randrange(100), rng.randrange(10))
    begin, ids = tokenizer.encode(prompt), tokenizer.encode(answer)
    tokens = np.array(begin + ids)
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(begin) - 1 :] = 1 / (16 * len(ids))
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights})


def _problem(number: int) -> dict[str, Any]:
    return {"question": question(number), "answer": f"It holds {DIGIT}.\n#### {DIGIT}"}


def _talk(number: int) -> dict[str, Any]:
    said = [("user", question(number) + SUFFIX), ("assistant", f"\\boxed{{{DIGIT}}}")]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def _dataset(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
