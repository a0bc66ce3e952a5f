"""Run-ahead: idle rows of decode passes answer prompts of the next step, to lead its drafts (SRT, arXiv 2601.09083).

Run-ahead delays nobody by a pass: its rows are in passes that others need, give way when anything waits for a row or a
block, and what they say goes to the drafter alone. Tokens of their prompts are computed in the same passes, as a draft
that stands whatever is chosen.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from tilth.engines.blocks import BlockManager
from tilth.engines.draft import Draft, Drafter
from tilth.engines.lanes import Draw, LengthBucket
from tilth.engines.request import Request, SequenceState

SHARE = 4
"""Rows of others and positions of run-ahead in a pass are at most this part of ``draft.FREE``."""


class RunAhead:
    """Requests that are likely to come next, and rows of an engine's lanes that answer them."""

    def __init__(self, drafter: Drafter, blocks: BlockManager, free: int, rows: int, tokens: int, most: int) -> None:
        """free: positions that a pass computes in the time that it takes whatever they are; rows: of the engine at
        most; tokens: of a draft at most; most: positions of a pass."""
        self._drafter, self._blocks, self._rows, self._tokens, self._most = drafter, blocks, rows, tokens, most
        self._positions = free // SHARE
        self._next = deque[Request]()
        self._count = self._flying = 0

    def expect(self, requests: Iterable[Request]) -> None:
        """Take what is likely to come next, in place of what was expected before."""
        self._next = deque(requests)

    def rows(self, lane: LengthBucket) -> list[int]:
        """Return the rows of run-ahead in a lane."""
        if not self._flying:
            return []
        return [row for row in lane.rows.tolist() if lane.answer(row).ahead is not None]

    def tend(self, lanes: Collection[LengthBucket], waits: bool, draw: Draw) -> None:
        """End rows that are in somebody's way, and begin others. waits: requests wait for rows."""
        own = {lane: len(lane.rows) - len(self.rows(lane)) for lane in lanes}
        total = sum(own.values())
        tight = self._blocks.free < total * (1 + self._blocks.blocks_for(self._tokens + 1)) + self._positions
        for lane in lanes:
            if waits or tight or not own[lane]:
                self.end(lane, self.rows(lane))
        if waits or tight or not total:
            return
        lane = max((lane for lane in lanes if own[lane]), key=lambda one: one.limit)
        spare = min(self._positions - len(lane.rows), self._rows - sum(len(lane.rows) for lane in lanes))
        while self._next and spare > 0:
            request = self._next.popleft()
            if len(request.prompt) < lane.limit:
                self._begin(request, lane, draw)
                spare -= 1

    def _begin(self, request: Request, lane: LengthBucket, draw: Draw) -> None:
        """Place a row at the first token of its prompt, which is in its columns with all others."""
        self._count, self._flying = self._count + 1, self._flying + 1
        prompt = np.asarray(request.prompt, np.int64)
        more = len(prompt) - 1 + request.params.max_tokens
        params = replace(request.params, max_tokens=more, stop_tokens=(), stop=())
        answer = SequenceState.start(Request(-self._count, prompt[:1], params, draws=(0, 0)))
        answer.ahead = request
        row = lane.place([answer], lane.slab, [0], draw)[0]
        lane.columns.tokens[row, : len(prompt)] = prompt

    def feed(self, lane: LengthBucket, drafts: dict[int, Draft], live: np.ndarray) -> None:
        """Write what rows of run-ahead compute of their prompts among the drafts of rows; those for which the pass has
        no place are live no more. live: bool [rows]."""
        mine = self.rows(lane)
        own = int(live.sum()) - len(mine)
        spare = min(self._positions, self._most - sum(len(draft.tokens) for draft in drafts.values())) - own
        for row in mine:
            at, answer = int(lane.columns.position[row]), lane.answer(row)
            count = min(spare, max(1, len(_request(answer).prompt) - at))
            live[row] = count > 0 and self._blocks.extend(answer.table, at + count)
            if live[row]:
                spare -= count
                drafts[row] = Draft(lane.columns.tokens[row, at + 1 : at + count].tolist(), range(count - 1))

    def force(self, lane: LengthBucket, chosen: np.ndarray) -> None:
        """Write tokens of prompts over what was chosen in their place. chosen: int64 [rows, width]."""
        for row in self.rows(lane):
            start = int(lane.columns.position[row]) + 1
            known = np.asarray(_request(lane.answer(row)).prompt, np.int64)[start : start + chosen.shape[1]]
            chosen[row, : len(known)] = known

    def settle(self, lane: LengthBucket, counts: np.ndarray, ended: np.ndarray) -> int:
        """End rows of run-ahead that have said all; return the tokens that rows have said in the pass beside prompts.

        counts: int64 [rows], tokens that rows advanced by; ended: rows at their last token."""
        said, done = 0, list[int]()
        for row in self.rows(lane):
            at, request = int(lane.columns.position[row]), _request(lane.answer(row))
            if at >= len(request.prompt) and counts[row]:
                said += 1
                if row in ended or int(lane.columns.tokens[row, at]) in request.params.stop_tokens:
                    done.append(row)
        self.end(lane, done)
        return said

    def end(self, lane: LengthBucket, rows: Sequence[int]) -> None:
        """Remove rows of run-ahead; the drafter gets what they have said."""
        for row in rows:
            answer = lane.take(row)
            self._flying -= 1
            self._blocks.close(answer.table)
            prompt = np.asarray(_request(answer).prompt, np.int64)
            if len(said := answer.tokens[len(prompt) :]):
                self._drafter.note(prompt, said)


def _request(answer: SequenceState) -> Request:
    assert answer.ahead is not None
    return answer.ahead
