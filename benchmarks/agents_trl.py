"""TRL's environment support beside Tilth's episodes: the same model, tools, waits and ids. ``agents.py`` calls it.

The model is a transformer of the shape of ``agents.py`` with Qwen3's template, whose weights make each token follow
from the one before: every turn is some words and a call of the tool. Both sides do all of its arithmetic, and must come
to the same ids. TRL: ``GRPOTrainer(environment_factory=...)``; its generation with the loop over tools is timed. It
calls the tools of a batch one after another and computes the whole conversation in each turn.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from agents_env import latency
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.envs.pool import EnvironmentPool
from tilth.rollout.episodes import Limits, Player
from tilth.runs.models import load_model

ENVIRONMENT = f"{Path(__file__).with_name('agents_env.py')}:Looking"
CALL = '\n{"name": "look", "arguments": {"number": 7}}\n'
WORDS = [f" word{i}" for i in range(8)]
TURN = [*WORDS, "<tool_call>", CALL, "</tool_call>", "<|im_end|>"]
"""What the model says in every turn, token by token."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 2048
GROUP = 8
MARGIN = 40.0


def make_model(folder: Path) -> None:
    """Write the model and its tokenizer, as of Hugging Face."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    template: str = chat_template_utils.qwen3_chat_template
    core.train_from_iterator([template], trainer)
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in (*WORDS, "<tool_call>", CALL, "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    before = tokenizer.convert_tokens_to_ids(["Ċ", *TURN[:-1]])
    after = tokenizer.convert_tokens_to_ids(TURN)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedding = torch.nn.functional.normalize(torch.randn(len(tokenizer), 128), dim=1)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        model.lm_head.weight[after] = MARGIN * embedding[before]
    model.save_pretrained(folder)


class LookingAround:
    """The environment in TRL's form."""

    def reset(self, number: int, turns: int, middle: float, spread: float, **rest: Any) -> None:
        self.number, self.middle, self.spread, self.turns = number, middle, spread, 0

    def look(self, number: int) -> str:
        """Look at a number.

        Args:
            number: The number.
        """
        self.turns += 1
        time.sleep(latency(self.number, self.turns, self.middle, self.spread))
        return str(self.number * self.turns % 97)

    def get_reward(self) -> float:
        """Return the number of turns."""
        return float(self.turns)


def trl_plays(folder: Path, infos: list[dict[str, Any]]) -> tuple[float, list[list[int]]]:
    """Return the seconds of TRL's generation with its tools, and the ids behind each prompt."""
    count, turns = len(infos), infos[0]["turns"]
    rows = [{**info, "prompt": [{"role": "user", "content": info["prompt"]}]} for info in infos]
    with tempfile.TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, per_device_train_batch_size=count, num_generations=GROUP,
            max_completion_length=CONTEXT, max_tool_calling_iterations=turns, max_steps=1, report_to="none",
            save_strategy="no", temperature=1.0, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            str(folder), args=settings, train_dataset=Dataset.from_list(rows), environment_factory=LookingAround
        )
        found: dict[str, Any] = {}
        inner = trainer._generate

        def timed(prompts: list[Any]) -> Any:
            began = time.perf_counter()
            answer = inner(prompts)
            found["seconds"], found["ids"] = time.perf_counter() - began, answer[1]
            return answer

        trainer._generate = timed
        trainer._generate_and_score_completions(rows)
    return found["seconds"], found["ids"]


@contextmanager
def playing(folder: Path, rows: int) -> Iterator[Player]:
    """Tilth's side: the model in its engine, and the environments beside it."""
    model = load_model(str(folder))
    tokenizer = Tokenizer.load(folder)
    options = EngineOptions(tokenizer=tokenizer, max_rows=rows, max_length=CONTEXT, kv_tokens=rows * CONTEXT)
    engine = Engine(model.config, options)
    engine.update_weights(model.tensors.items(), version=1)
    pool = EnvironmentPool(ENVIRONMENT, workers=1, timeout=30.0)
    try:
        yield Player(engine, make_template("model", tokenizer), tokenizer, pool, Limits(100, CONTEXT))
    finally:
        pool.close()
