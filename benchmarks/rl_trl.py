"""TRL's side of ``rl_vs_trl.py``: ``GRPOTrainer`` with the same task; its methods are timed from outside.

python benchmarks/rl_trl.py TASK.json RESULT.json
"""

import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rl_task import EOS, Task, cores, low_share, peak_bytes, print_of
from shapes import SHAPES
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NO_TOKEN = -1


def wait() -> None:
    """Until a GPU has done what it was given: before a clock is read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Seconds by part since the last step."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, method: str, part: str) -> None:
        """Count the time of ``owner.method`` as ``part``."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                wait()
                self.parts[part] += time.perf_counter() - began

        setattr(owner, method, timed)


class Lengths(LogitsProcessor):
    """Each row ends, by the end token, at its own given length and not before it."""

    def __init__(self, lengths: list[int], prompt: int) -> None:
        self.lengths, self.prompt = torch.tensor(lengths), prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = self.lengths.to(scores.device) == input_ids.shape[1] - self.prompt + 1
        scores[:, EOS] = -torch.inf
        scores[last] = -torch.inf
        scores[last, EOS] = 0.0
        return scores


class Steps(TrainerCallback):
    """A record at the end of each step."""

    def __init__(self, task: Task, clock: Clock) -> None:
        self.task, self.clock, self.found = task, clock, list[dict[str, Any]]()
        self.asked, self.rewards, self.before, self.cpu = list[str](), list[float](), 0.0, 0.0
        self.generated = 0
        """Tokens of the completions of the step, as TRL gives them to rewards."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait()
        now, cpu, task = time.perf_counter(), time.process_time(), self.task
        generated = self.generated
        self.found.append({
            "seconds": now - self.before, "cpu_seconds": cpu - self.cpu, "parts": dict(self.clock.parts),
            "reward": sum(self.rewards) / len(self.rewards), "prompts": print_of(self.asked[:: task.group]),
            "generated": generated, "trained": generated + task.samples * task.prompt_tokens,
        })  # fmt: skip
        self.before, self.cpu = now, cpu
        self.clock.parts.clear()


def settings(task: Task, folder: str) -> GRPOConfig:
    """TRL's names for the same things. Everything that costs time and changes nothing is off."""
    return GRPOConfig(
        output_dir=folder, use_cpu=task.device == "cpu", bf16=task.precision == "bf16", fp16=False,
        gradient_checkpointing=False, per_device_train_batch_size=task.samples, gradient_accumulation_steps=1,
        num_generations=task.group, max_completion_length=task.longest, max_steps=task.steps,
        learning_rate=task.lr, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=task.betas[0],
        adam_beta2=task.betas[1], weight_decay=0.0, max_grad_norm=task.clip, optim="adamw_torch_fused",
        beta=0.0, loss_type="dapo", scale_rewards="group", epsilon=0.2, temperature=1.0, shuffle_dataset=False,
        dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="steps",
        logging_steps=10**6, disable_tqdm=True, seed=0,
    )  # fmt: skip


def make_trainer(task: Task, folder: str, steps: Steps) -> GRPOTrainer:
    """The trainer, with every completion as long as the task says."""
    vocabulary = SHAPES[task.shape]["vocab_size"]

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        steps.asked, steps.rewards = prompts, [low_share(c, vocabulary) for c in completions]
        steps.generated = sum(map(len, completion_ids))
        return steps.rewards

    data = Dataset.from_list([{"prompt": task.texts[i]} for step in task.order for i in step])
    trainer = GRPOTrainer(
        task.folder, reward_funcs=reward, args=settings(task, folder), train_dataset=data, callbacks=[steps]
    )
    _give_lengths(trainer, task, lambda: len(steps.found))
    return trainer


def _give_lengths(trainer: GRPOTrainer, task: Task, step: Callable[[], int]) -> None:
    if not task.heavy:
        trainer.generation_config.eos_token_id, trainer.eos_token_ids = None, [NO_TOKEN]
        trainer.model.generation_config.eos_token_id = None
        trainer.generation_kwargs["eos_token_id"] = None
        return
    generate = trainer.model.generate

    def with_lengths(**inputs: Any) -> Tensor:
        rule = Lengths(task.lengths(step()), inputs["input_ids"].shape[1])
        found: Tensor = generate(**inputs, logits_processor=LogitsProcessorList([rule]))
        return found

    trainer.model.generate = with_lengths


def watch(trainer: GRPOTrainer, clock: Clock) -> None:
    """Put a clock around the trainer's parts."""
    clock.around(trainer, "_generate_single_turn", "generate")
    clock.around(trainer, "_calculate_rewards", "score")
    clock.around(trainer, "compute_loss", "update")
    clock.around(trainer.accelerator, "backward", "update")
    clock.around(trainer.accelerator, "clip_grad_norm_", "update")
    trainer.create_optimizer()
    clock.around(trainer.optimizer, "step", "update")


def main() -> None:
    warnings.filterwarnings("ignore")
    task = Task.load(Path(sys.argv[1]))
    torch.set_num_threads(cores(task.threads))
    clock = Clock()
    steps = Steps(task, clock)
    began = time.perf_counter()
    trainer = make_trainer(task, str(Path(sys.argv[2]).parent / "trl"), steps)
    watch(trainer, clock)
    trainer.train()
    whole = time.perf_counter() - began
    result = {
        "whole_seconds": whole,
        "steps": steps.found,
        "compile_seconds": 0.0,
        "peak_bytes": peak_bytes(task.device),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
