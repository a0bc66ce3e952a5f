"""Writer role: makes tables of generated trajectories, and writes those of committed steps."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Jagged, Store
from tilth.core.trajectory import Segment
from tilth.core.write_queue import SLOW
from tilth.data.prompts import PromptSet
from tilth.data.tokenizer import Tokenizer
from tilth.data.trajectories import COLUMNS, TrajectoryFiles
from tilth.plan.batch import prompt_lengths
from tilth.roles.experience import FINISHES, TURN_REWARDS, decoded_segments, texts

SHOWN = 1000
"""Characters of a prompt and an answer that the terminal shows."""


class TrajectoryWriter:
    """Reads the payload of a step's trajectories and writes it to files; the controller sees neither.

    The controller commits a step by its number. What was added and not committed is never written. tokenizer: of
    episodes, whose prompt and text are then what the policy saw and chose, special tokens included: the environment and
    its tools write the prompt, and a broken call has no other text.
    """

    def __init__(self, prompts: PromptSet, store: Store, tokenizer: Tokenizer | None = None) -> None:
        self.prompts, self.store, self.tokenizer = prompts, store, tokenizer
        self.files: TrajectoryFiles | None = None

    @transfer(split="all", gather="first")
    def open(self, folder: str, spill: str = "") -> None:
        """Write into this folder; spill: of ``TrajectoryFiles``, "": none. StorageError."""
        if self.files is not None:
            self.files.close()
        self.files = TrajectoryFiles(Path(folder), Path(spill) if spill else None)

    def close(self) -> None:
        """End the thread that writes; the last rows have been flushed."""
        if self.files is not None:
            self.files.close()

    @transfer(split="all", gather="first")
    def add(self, batch: Batch, step: int, learned: Batch | None = None) -> dict[str, Any]:
        """Add the trajectories of the running step; return one of them, cut for the terminal. learned: those that the
        policy was updated with, with what was computed of them."""
        table = self.table(batch, step)
        for name, column in {} if learned is None else self._learned(learned, table["id"]).items():
            table = table.append_column(name, column)
        self._files().add(table)
        first = table.slice(0, 1).select(["prompt_text", "text", "answer", "reward"]).to_pylist()[0]
        cut = {name: value[:SHOWN] if isinstance(value, str) else value for name, value in first.items()}
        return {"prompt": cut.pop("prompt_text"), **cut}

    @transfer(split="all", gather="merge")
    def commit(self, step: int) -> dict[str, Any]:
        """Commit the step; see ``TrajectoryFiles.commit``."""
        return dict(self._files().commit(step))

    @transfer(split="all", gather="first", patient=True)
    def flush(self, seconds: float = SLOW) -> dict[str, Any]:
        """Make everything committed durable; see ``TrajectoryFiles.flush``."""
        return dict(self._files().flush(seconds))

    @transfer(split="all", gather="first", patient=True)
    def rewind(self, step: int) -> None:
        """Drop all rows of later steps."""
        self._files().rewind(step)

    def _files(self) -> TrajectoryFiles:
        assert self.files is not None, "open comes first"
        return self.files

    def table(self, batch: Batch, step: int) -> pa.Table:
        """Trajectories as rows."""
        paid = [TURN_REWARDS] if TURN_REWARDS in batch.payload else []
        columns = batch.read(self.store, "tokens", "mask", "segments", "rollout_logprobs", "text", *paid)
        segments = [decoded_segments(row) for row in columns["segments"].rows()]
        turns = [_of_turns(columns, i) for i in range(len(batch))]
        completions = texts(columns["text"])
        asked = [self.prompts[int(p)] for p in batch["prompt"]]
        begun = [p.text for p in asked]
        if self.tokenizer is not None:
            begun, completions = _as_seen(self.tokenizer, columns)
        rewards = [None if np.isnan(r) else float(r) for r in batch["reward"]]
        return pa.table(
            {
                "step": pa.array(np.full(len(batch), step, np.int32)),
                "id": pa.array(batch["id"]),
                "group": pa.array(batch["group"]),
                "prompt": pa.array(batch["prompt"]),
                "prompt_text": pa.array(begun, pa.string()),
                "text": pa.array(completions, pa.string()),
                "answer": pa.array([p.answer for p in asked], pa.string()),
                "tokens": _lists(columns["tokens"], np.int32),
                "mask": _lists(columns["mask"], np.uint8),
                "segments": pa.array(
                    [[{"role": s.role, "start": s.start} for s in row] for row in segments],
                    COLUMNS.field("segments").type,
                ),
                "conversations": pa.array([_conversations(row) for row in segments], pa.list_(pa.int32())),
                "prompt_length": pa.array(prompt_lengths(columns["mask"])),
                "length": pa.array([int(row.sum()) for row in columns["mask"].rows()], pa.int32()),
                "reward": pa.array(rewards, pa.float32()),
                "parts": pa.array(_parts(batch), pa.map_(pa.string(), pa.float32())),
                "turn_rewards": pa.array(turns, pa.list_(pa.float32())),
                "finish": pa.array([FINISHES[f] for f in batch["finish"]], pa.string()),
                "logprobs": _lists(columns["rollout_logprobs"], np.float32),
                "version": pa.array(batch["version"]),
            }
        )

    def _learned(self, batch: Batch, ids: pa.ChunkedArray) -> dict[str, pa.Array]:
        """Return advantages, and the trainer's log-probs where the algorithm needs them, at tokens that the policy
        chose: of the rows with these ids, null for one that is not in the batch."""
        names = {"advantages": "advantages", "old_logprobs": "trainer_logprobs"}
        columns = batch.read(self.store, "mask", *(name for name in names if name in batch.payload))
        mask, place, found = columns.pop("mask").values, pc.index_in(ids, value_set=pa.array(batch["id"])), {}
        for name, column in columns.items():
            chosen = Jagged(np.where(mask != 0, column.values, 0), column.offsets)
            found[names[name]] = _lists(chosen, np.float32).take(place.combine_chunks())
        return found


def _as_seen(tokenizer: Tokenizer, columns: Mapping[str, Jagged]) -> tuple[list[str], list[str]]:
    """Return the prompt of each row, and what the policy chose in it, both with special tokens."""
    prompts, chosen = [], []
    for row, length in enumerate(prompt_lengths(columns["mask"]).tolist()):
        tokens, mask = columns["tokens"].row(row), columns["mask"].row(row)
        prompts.append(tokenizer.decode(tokens[:length].tolist(), special=True))
        chosen.append(tokenizer.decode(tokens[mask > 0].tolist(), special=True))
    return prompts, chosen


def _parts(batch: Batch) -> list[list[tuple[str, float]]]:
    """Return the named parts of each row's reward."""
    named = {name.removeprefix("part/"): batch[name] for name in batch.rows if name.startswith("part/")}
    return [[(name, float(c[i])) for name, c in named.items() if not np.isnan(c[i])] for i in range(len(batch))]


def _conversations(segments: list[Segment]) -> list[int] | None:
    """Return the first token of each conversation of an episode with several."""
    further = [s.start for s in segments if s.opens]
    return [0, *further] if further else None


def _of_turns(columns: Mapping[str, Jagged], row: int) -> list[float] | None:
    """Return the reward of each assistant segment of a row; None where no turn has one."""
    if TURN_REWARDS not in columns or not (paid := columns[TURN_REWARDS].row(row)).any():
        return None
    segments = decoded_segments(columns["segments"].row(row))
    borders = pairwise([*(s.start for s in segments), len(paid)])
    sums = [float(paid[a:b].sum(dtype=np.float64)) for a, b in borders]
    return [earned for s, earned in zip(segments, sums) if s.role == "assistant"]


def _lists(column: Jagged, dtype: type) -> pa.ListArray:
    offsets = pa.array(column.offsets.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(column.values.astype(dtype)))
