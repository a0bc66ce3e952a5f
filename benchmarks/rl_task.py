"""The task of ``rl_vs_trl.py``, known to both contenders and bound to neither: model, prompts, reward, lengths."""

import hashlib
import json
import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapes import CONTEXT, SHAPES, as_hugging_face

HERE = Path(__file__).parent
PAD, EOS = 0, 1


@dataclass(frozen=True)
class Task:
    """One race: everything that must be the same for all. Written as JSON for the contenders' processes."""

    folder: str
    shape: str = "6M"
    precision: str = "fp32"
    heavy: bool = False
    steps: int = 30
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 16
    tokens: int = 48
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    threads: int = 0
    device: str = "cpu"

    @classmethod
    def load(cls, path: Path) -> "Task":
        """From the file that ``save`` wrote."""
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @property
    def samples(self) -> int:
        """Completions a step."""
        return self.prompts * self.group

    @property
    def longest(self) -> int:
        """Most tokens of a completion."""
        return max(max(self.lengths(step)) for step in range(self.steps)) if self.heavy else self.tokens

    def lengths(self, step: int) -> list[int]:
        """Tokens of each completion of a step (from 0), prompt after prompt."""
        if not self.heavy:
            return [self.tokens] * self.samples
        every = json.loads((HERE / "lengths.json").read_text())["lengths"]
        return [every[(step * self.samples + i) % len(every)] for i in range(self.samples)]

    @property
    def texts(self) -> list[str]:
        """All prompts."""
        found: list[str] = json.loads((Path(self.folder) / "prompts.json").read_text())["texts"]
        return found

    @property
    def order(self) -> list[list[int]]:
        """Prompts of each step, as Tilth draws them; TRL reads its dataset in this order."""
        found: list[list[int]] = json.loads((Path(self.folder) / "prompts.json").read_text())["order"]
        return found


def low_share(completion: str, vocabulary: int) -> float:
    """The reward: which share of the words is of the first quarter of the vocabulary."""
    words = completion.split()
    return sum(int(word[1:]) < vocabulary // 4 for word in words) / max(len(words), 1)


def words(ids: Any) -> str:
    """Text of token ids: a word for each."""
    return " ".join(f"w{i}" for i in ids)


def print_of(prompts: list[str]) -> str:
    """A hash of the prompts of a step, to see that both contenders were asked the same."""
    return hashlib.blake2b("\n".join(prompts).encode(), digest_size=6).hexdigest()


def save_model(folder: Path, shape: str) -> None:
    """Random weights and a tokenizer of one word for each token, as ``transformers`` saves them."""
    import tokenizers
    import torch
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**as_hugging_face(shape), max_position_embeddings=CONTEXT, eos_token_id=EOS, pad_token_id=PAD)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, SHAPES[shape]["vocab_size"])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def peak_bytes(device: str) -> int:
    """Most bytes of tensors on a GPU; elsewhere, greatest resident memory of this process plus its largest child's."""
    import torch

    from tilth.runs.metrics import resident

    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    return resident()[1] + 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def cores(threads: int) -> int:
    """Threads to use: as asked, or one for each core."""
    return threads or len(os.sched_getaffinity(0))
