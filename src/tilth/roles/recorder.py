"""The recorder role: turns payload into what people read (tables of trajectories) and data into payload."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Column, Ragged, Store
from tilth.core.trajectory import ROLES
from tilth.data.examples import supervised
from tilth.data.prompts import PromptSet
from tilth.data.template import Template
from tilth.roles.experience import FINISHES, identity, texts
from tilth.trace.spans import span
from tilth.training.packed import prompt_lengths


class RecorderWorker:
    """Sits next to the store and knows the template and the data."""

    def __init__(self, prompts: PromptSet, template: Template, context: int, store: Store) -> None:
        self.prompts = prompts
        self.template = template
        self.context = context
        self.store = store

    @transfer(split="all", gather="first")
    def examples(self, indices: Sequence[int]) -> Batch:
        """Prompts with their answers as token payload; the mask is 1 on what the policy would write."""
        with span("load") as spent:
            found = supervised([self.prompts[int(i)] for i in indices], self.template, self.context)
            spent.set(tokens=sum(len(e.tokens) for e in found))
        rows: dict[str, np.ndarray] = {
            "prompt": np.asarray(indices, np.int64),
            "length": np.array([len(e.tokens) for e in found], np.int32),
            "identity": np.array([identity(e.tokens) for e in found], np.uint32),
        }
        payload = {"tokens": [e.tokens for e in found], "mask": [e.mask for e in found]}
        put = {k: Column.whole(self.store.put(k, Ragged.of(v)), len(found)) for k, v in payload.items()}
        return Batch(rows, put)

    @transfer(split="all", gather="first")
    def table(self, batch: Batch, step: int) -> tuple[pa.Table, dict[str, Any]]:
        """All trajectories of a step as a table, one row each, and one of them for the terminal."""
        columns = batch.read(self.store, "tokens", "mask", "segments", "rollout_logprobs", "text")
        said = texts(columns["text"])
        asked = [self.prompts[int(p)] for p in batch["prompt"]]
        rewards = [None if np.isnan(r) else float(r) for r in batch["reward"]]
        table = pa.table(
            {
                "step": pa.array(np.full(len(batch), step, np.int32)),
                "id": pa.array(batch["id"]),
                "group": pa.array(batch["group"]),
                "prompt": pa.array(batch["prompt"]),
                "prompt_text": pa.array([p.text for p in asked]),
                "text": pa.array(said),
                "answer": pa.array([p.answer for p in asked], pa.string()),
                "tokens": _lists(columns["tokens"], np.int32),
                "mask": _lists(columns["mask"], np.uint8),
                "segments": pa.array([_segments(columns["segments"].row(i)) for i in range(len(batch))]),
                "prompt_length": pa.array(prompt_lengths(columns["mask"])),
                "reward": pa.array(rewards, pa.float32()),
                "parts": pa.array(_parts(batch), pa.map_(pa.string(), pa.float32())),
                "finish": pa.array([FINISHES[f] for f in batch["finish"]]),
                "logprobs": _lists(columns["rollout_logprobs"], np.float32),
                "version": pa.array(batch["version"]),
            }
        )
        first = asked[0]
        sample = {"prompt": first.text, "text": said[0], "answer": first.answer, "reward": rewards[0]}
        return table, sample


def _parts(batch: Batch) -> list[list[tuple[str, float]]]:
    """Named parts of each row's reward, those that it has."""
    named = {name.removeprefix("part/"): batch[name] for name in batch.rows if name.startswith("part/")}
    return [[(name, float(c[i])) for name, c in named.items() if not np.isnan(c[i])] for i in range(len(batch))]


def _segments(coded: np.ndarray) -> list[dict[str, Any]]:
    return [{"role": ROLES[role], "start": start} for role, start in coded.reshape(-1, 2).tolist()]


def _lists(column: Ragged, dtype: type) -> pa.ListArray:
    offsets = pa.array(column.offsets.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(column.values.astype(dtype)))
