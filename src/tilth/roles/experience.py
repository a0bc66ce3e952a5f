"""Convert trajectories to rows and payload."""

import zlib
from collections.abc import Sequence

import numpy as np

from tilth.core.batch import Batch, Column, Jagged, Store
from tilth.core.errors import TokenIdentityError
from tilth.core.media import MEDIA, pack_media
from tilth.core.trajectory import OPENS, ROLES, Segment, Trajectory, token_versions
from tilth.plan.batch import RowTable
from tilth.trace.spans import span

FINISHES = ("stop", "length", "aborted", "error")
CUT = FINISHES.index("length")
"""``finish`` of a completion that reached rollout.max_tokens."""
ROUTING = "routing"
"""Payload column of ``Trajectory.routing``: one item of bytes for each token, the numbers of its experts."""
NOT_BY_TOKEN = ("text", "segments", ROUTING, MEDIA)
"""Payload columns that have no number for each token."""
INFO = "info"
"""Payload column of what ``Environment.reset`` gets, as JSON."""
TURN_REWARDS = "turn_rewards"
"""Payload column of episodes: the reward of each turn at its last token, float32, 0 elsewhere. The row's ``reward`` has
them in it."""
CARRIED = "carried"
"""Row column with ``rollout.partial``: 1 for a sample that was not finished in its step."""
TURN_REWARD = "turn_reward"
"""Row column of their sum, float32."""
TURNS = "turns"
"""Row column of the number of the policy's turns in an episode, float32."""
CALLS = "calls"
"""Calls of tools in an episode; nan without tools in its prompt."""
CHUNK_TOKENS = "chunk_tokens"
"""Payload column of a teacher with another tokenizer: tokens of the policy in the chunk of each, float32; 0 in none."""
UNALIGNED = "unaligned"
"""Row column: tokens that the policy chose and that are in no chunk, int32."""
TEACHER_KL = "teacher_kl"
"""Row column: log p - log q summed over the tokens that the policy chose, q of the row's own teacher, float64."""
OUTCOME = "outcome"
"""Row column of the verifier's result; reward shaping never changes it."""


def to_batch(trajectories: Sequence[Trajectory], store: Store, *, by_turn: bool = False, media: bool = False) -> Batch:
    """Convert to rows (ids, lengths, reward, outcome, version, finish, checksum of the ids, length and digest of the
    prompt) and payload (tokens, mask, logprobs, versions of chosen tokens, text, and segments as code and start in
    turn).

    by_turn: add the rewards of turns, as payload and their sum as a row column. media: add the items of prompts."""
    rewards = np.array([np.nan if t.reward is None else t.reward for t in trajectories], np.float32)
    tokens, mask = Jagged.of([t.tokens for t in trajectories]), Jagged.of([t.mask for t in trajectories])
    rows: dict[str, np.ndarray] = {
        "id": np.array([t.id for t in trajectories], np.int64),
        "group": np.array([t.group for t in trajectories], np.int64),
        "prompt": np.array([t.prompt for t in trajectories], np.int64),
        "length": tokens.lengths.astype(np.int32),
        "completion": np.diff(np.append(0, np.cumsum(mask.values != 0))[mask.offsets]).astype(np.int32),
        "reward": rewards,
        OUTCOME: rewards.copy(),
        "version": np.array([t.versions[-1][1] if t.versions else 0 for t in trajectories], np.int32),
        "finish": np.array([FINISHES.index(t.finish) for t in trajectories], np.int8),
        "identity": np.array([identity(t.tokens) for t in trajectories], np.uint32),
    }
    columns = {
        "tokens": tokens,
        "mask": mask,
        "rollout_logprobs": Jagged.of([t.logprobs for t in trajectories]),
        "versions": Jagged(token_versions(trajectories), tokens.offsets),
        "segments": Jagged.of([np.array(_coded(t), np.int32) for t in trajectories]),
        "text": Jagged.of([np.frombuffer(t.text.encode(), np.uint8) for t in trajectories]),
    }
    if by_turn:
        columns[TURN_REWARDS] = Jagged.of([t.token_rewards() for t in trajectories])
        rows[TURN_REWARD] = np.array([sum(r for _, r in t.turn_rewards) for t in trajectories], np.float32)
    if trajectories and all(t.routing is not None for t in trajectories):
        packed = [np.ascontiguousarray(t.routing) for t in trajectories]  # numbers [T, n], an item of bytes a token
        columns[ROUTING] = Jagged.of([one.view(np.dtype((np.void, one.strides[0]))).ravel() for one in packed])
    if media:
        columns[MEDIA] = Jagged.of([pack_media(t.media) for t in trajectories])
    rows |= RowTable.of(tokens, mask.values, _opens(columns["segments"], tokens)).columns()
    return Batch(rows, {k: Column.whole(store.put(k, v), len(trajectories)) for k, v in columns.items()})


def recorded_experts(column: Jagged, layers: int, experts: int, chosen: int) -> np.ndarray:
    """Return the experts of each token, int64 [N, layers, k], of a column of routing; -1 where they are not known.

    layers: with experts; experts: of each of them; chosen: k. N may be 0: a rank can be left without rows.
    """
    items = np.ascontiguousarray(column.values)
    kind = np.uint8 if experts < np.iinfo(np.uint8).max else np.int16
    found = items.view(kind).reshape(len(items), layers, chosen)
    return np.where(found == np.iinfo(kind).max, -1, found.astype(np.int64))


def _coded(trajectory: Trajectory) -> list[int]:
    codes = [(ROLES.index(s.role) + len(ROLES) * s.opens, s.start) for s in trajectory.segments]
    return [number for code in codes for number in code]


def decoded_segments(coded: np.ndarray) -> list[Segment]:
    """Return the segments of one row of the payload ``segments``."""
    return [
        Segment(ROLES[code % len(ROLES)], start, code >= len(ROLES)) for code, start in coded.reshape(-1, 2).tolist()
    ]


def of_pass(batch: Batch, store: Store, tokens: Jagged) -> dict[str, np.ndarray]:
    """Return the columns of a pass beside tokens that the batch has: ``media``, and ``opens``, uint8 [N], if an episode
    has several conversations."""
    opens = _opens_of(batch, store, tokens)
    return media_of(batch, store) | ({} if opens is None else {OPENS: opens})


def _opens_of(batch: Batch, store: Store, tokens: Jagged) -> np.ndarray | None:
    return _opens(batch.read(store, "segments")["segments"], tokens) if "segments" in batch.payload else None


def _opens(segments: Jagged, tokens: Jagged) -> np.ndarray | None:
    codes, starts = segments.values[::2], segments.values[1::2]
    rows = np.repeat(tokens.offsets[:-1], segments.lengths // 2)
    first = (rows + starts)[codes >= len(ROLES)].astype(np.int64)
    found = np.zeros(len(tokens.values), np.uint8)
    found[first] = 1
    return found if len(first) else None


def media_of(batch: Batch, store: Store) -> dict[str, np.ndarray]:
    """Return the column ``media`` of the batch's rows, object [n]; empty if all are text."""
    if MEDIA not in batch.payload:
        return {}
    column, found = batch.read(store, MEDIA)[MEDIA], np.empty(len(batch), object)
    for row, packed in enumerate(column.rows()):  # at once, rows of one length would be a matrix
        found[row] = packed
    return {MEDIA: found} if len(column.values) else {}


def on_rows(op: str, batch: Batch) -> span:
    """Return the span of work on all tokens of these rows."""
    lengths = batch["length"].astype(np.int64)
    return span(op, tokens=int(lengths.sum()), squares=int(lengths @ lengths))


def row_names(batch: Batch) -> dict[str, np.ndarray]:
    """Return the columns that name rows in messages: the prompt, and the trajectory of a sample."""
    return {title: batch[name] for name, title in (("prompt", "prompt"), ("id", "trajectory")) if name in batch.rows}


def outcome(batch: Batch) -> np.ndarray:
    """Return the verifier's result of each row, before reward shaping: float32 [n], NaN without one.

    It is the part ``correct`` of the reward function if there is one, else its reward; of a reward model alone its
    reward.
    """
    return batch[OUTCOME]


def is_right(batch: Batch) -> np.ndarray:
    """Return bool [n], True for answers that the verifier accepts."""
    return outcome(batch) >= 1


def samples_of(batch: Batch) -> list[tuple[int, int]]:
    """Return (trajectory, checksum of its ids) of each row."""
    return list(zip(batch["id"].tolist(), batch["identity"].tolist()))


def identity(tokens: np.ndarray) -> int:
    """Return the CRC-32 of token ids as int64."""
    return zlib.crc32(np.ascontiguousarray(tokens, np.int64).tobytes())


def check_identity(batch: Batch, tokens: Jagged) -> None:
    """Raise TokenIdentityError unless these are the ids that the rollout engine produced."""
    for i, (ids, expected) in enumerate(zip(tokens.rows(), batch["identity"])):
        if identity(ids) != expected:
            raise TokenIdentityError(
                f"trajectory {batch['id'][i]}: its {len(ids)} token ids are not those that were generated "
                "(they must never be re-tokenised or edited between rollout and training)",
                key=f"trajectory.{batch['id'][i]}.tokens",
            )


def texts(column: Jagged) -> list[str]:
    """Decode a text column."""
    return [row.tobytes().decode() for row in column.rows()]


def put_like(batch: Batch, store: Store, name: str, values: np.ndarray, like: Jagged) -> Batch:
    """Add a payload column with the same row lengths as another one."""
    handle = store.put(name, Jagged(values, like.offsets))
    return batch.with_payload(**{name: Column.whole(handle, len(batch))})


def put_mask(batch: Batch, store: Store, name: str, mask: np.ndarray, tokens: Jagged) -> Batch:
    """Add a mask of the batch's tokens, and the row columns of the prompts before its first tokens."""
    table = RowTable.of(tokens, mask, _opens_of(batch, store, tokens))
    return put_like(batch, store, name, mask, tokens).with_rows(**table.columns(name))
