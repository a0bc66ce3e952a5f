"""Judge role: a frozen model that grades answers by a rubric, or names the first wrong step of right ones (FAPO)."""

import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from tilth.cluster.protocol import control, transfer
from tilth.config.schema import JudgeConfig as JudgeSection
from tilth.core.batch import Batch, Store
from tilth.core.errors import DataError
from tilth.data.columns import Prompt
from tilth.data.prompts import PromptSet
from tilth.data.template import Template
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.rewards.ahead import ScoringAhead
from tilth.rewards.functions import LARGEST
from tilth.rewards.judging import grade, grading, question, steps, verdict
from tilth.rewards.process_pool import Item, Outcome
from tilth.roles.experience import OUTCOME, texts
from tilth.trace.spans import span

VERDICT = "verdict"
"""Row column of a judged batch: index of the first wrong step, -1 none, NaN without a usable verdict."""
GRADE = "part/judge"
"""Row column of a graded batch: the judge's score, NaN without one."""
JUDGED_BY = "judged_by"
"""Row column beside it: the training step of the judge's checkpoint."""


class JudgeWorker:
    """Generation engine with the judge's weights and template.

    Verdicts are greedy, so a repeated step gets the same ones.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        template: Template,
        section: JudgeSection,
        store: Store,
        prompts: PromptSet | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """prompts: to grade answers as soon as they are finished, for an engine whose replies do not depend on what it
        generates beside them; None: not before ``grade``. share: (number, count) of the engines that do."""
        self.engine, self.template, self.section, self.store = engine, template, section, store
        self.prompts, self.share = prompts, share
        self._failures: dict[int, dict[str, Any]] = {}
        self._ahead: tuple[int, ScoringAhead] | None = None
        self._engine_free = threading.Lock()

    @transfer(split="rows", gather="rows", over=("dp",))
    def verdicts(self, batch: Batch) -> Batch:
        """Fill in the row columns ``verdict`` and ``judged_by`` from the payload text, prompt_text and answer.

        The verdict is NaN for a solution that does not fit, that the judge's tokens cannot express, or whose answer
        names no step.
        """
        columns = batch.read(self.store, "text", "prompt_text", "answer")
        solutions, prompts, answers = (texts(column) for column in columns.values())
        written = [steps(text) for text in solutions]
        asked = [self._ask(int(i), p, a, s) for i, p, a, s in zip(batch["id"], prompts, answers, written)]
        requests = [request for request in asked if request is not None]
        with span("judge") as spent:
            self.engine.reset_prefix_cache()  # no trace of earlier steps, so that a resumed run does the same work
            replies = {t.id: t.text for t in EngineRounds(self.engine).drain(requests)}
            spent.set(tokens=sum(len(request.prompt) for request in requests))
        found = [verdict(replies.get(i, ""), len(s)) for i, s in zip(batch["id"].tolist(), written)]
        rows = {VERDICT: np.array([np.nan if v is None else v for v in found], np.float32)}
        rows[JUDGED_BY] = np.full(len(batch), self.engine.version, np.int64)
        return batch.with_rows(**rows)

    @control
    def begin(self, items: list[list[Any]], call: int, most: int) -> None:
        """Grade this engine's share of samples (id, prompt, checksum of the ids, text) in the background, at most
        ``most`` at once. call: the generation that they are from; those of another one are dropped."""
        if self.prompts is None:
            return
        if self._ahead is None or self._ahead[0] != call:
            if self._ahead is not None:
                self._ahead[1].drop()
            self._ahead = call, ScoringAhead(self, most)
        number, count = self.share
        mine = [
            (int(i), int(checksum), self.prompts[int(p)], text) for i, p, checksum, text in items if i % count == number
        ]
        self._ahead[1].begin({(i, checksum): (i, p.text, text, p.info) for i, checksum, p, text in mine})

    @transfer(split="all", gather="merge")
    def begun(self, call: int) -> dict[tuple[int, int], Outcome]:
        """Begin nothing more, and return the scores that ``begin`` has brought for a generation, by sample (id,
        checksum)."""
        return dict(self._ahead[1].settle()) if self._ahead is not None and self._ahead[0] == call else {}  # type: ignore[arg-type]

    @transfer(split="rows", gather="rows", over=("dp",))
    def grade(self, batch: Batch, *, alone: bool, known: dict[tuple[int, int], Outcome] | None = None) -> Batch:
        """Add the judge's score to the row column ``reward``, and as ``part/judge``; NaN: missing.

        alone: there is no other reward, so that this is the ``outcome`` too. known: from ``begun``, not asked again. An
        answer that the judge cannot be asked about, and a reply without a score, make the reward missing: ``failures``
        says why.
        """
        columns = batch.read(self.store, "text", "prompt_text", "answer")
        completions, prompts, answers = (texts(column) for column in columns.values())
        found = dict(known or {})
        samples = list(zip(batch["id"].tolist(), batch["identity"].tolist()))
        rest = [
            (sample, (sample[0], prompt, completion, {"answer": answer}))
            for sample, prompt, answer, completion in zip(samples, prompts, answers, completions)
            if sample not in found
        ]
        found |= dict(zip([sample for sample, _ in rest], self.score([item for _, item in rest])))
        outcomes = [found[sample] for sample in samples]
        self._failures = {i: asdict(o) for (i, _), o in zip(samples, outcomes) if o.value is None}
        scores = np.array([np.nan if o.value is None else o.value for o in outcomes], np.float64)
        total = (0.0 if alone else batch["reward"].astype(np.float64)) + scores
        reward = np.where(np.abs(total) <= LARGEST, total, np.nan).astype(np.float32)
        outcome = reward.copy() if alone else batch[OUTCOME]
        return batch.with_rows(**{"reward": reward, OUTCOME: outcome, GRADE: scores.astype(np.float32)})

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Ask the judge about answers (id, prompt, completion, info), and return its scores in order."""
        rubric = self.section.rubric
        ids = [cast(int, item[0]) for item in items]
        asked = [
            self._request(i, grading(rubric, p, str(info.get("answer", "")), c))
            for i, (_, p, c, info) in zip(ids, items)
        ]
        requests = [request for request in asked if request is not None]
        with self._engine_free, span("judge") as spent:
            self.engine.reset_prefix_cache()  # as in ``verdicts``
            replies = {t.id: t.text for t in EngineRounds(self.engine).drain(requests)}
            spent.set(tokens=sum(len(request.prompt) for request in requests))
        return [_graded(replies.get(i)) for i in ids]

    @transfer(split="all", gather="merge")
    def failures(self) -> dict[int, dict[str, Any]]:
        """Return reason and status of the answers of the last ``grade`` without a score, by trajectory id."""
        return self._failures

    def _ask(self, id: int, prompt: str, answer: str, written: list[str]) -> Request | None:
        """Return the question about one solution; None if the judge cannot be asked about it."""
        return self._request(id, question(prompt, answer, written)) if written else None

    def _request(self, id: int, text: str) -> Request | None:
        """Return the request of a prompt; None if the judge cannot read it."""
        try:
            ids = self.template.prompts([Prompt(id, text)])[0]
        except DataError:  # a character that the judge has no token for
            return None
        room = min(self.section.max_tokens, self.engine.max_length - len(ids))
        if not ids or room < 1:
            return None
        return Request(id=id, prompt=ids, params=SamplingParams(room, 0.0, stop_tokens=self.template.stops))


def _graded(reply: str | None) -> Outcome:
    """Return the score of a reply. reply: None: the judge was not asked."""
    if reply is None:
        reason = "the judge cannot read the question: it does not fit its context, or has characters without tokens"
    elif (score := grade(reply)) is not None:
        return Outcome(score)
    else:
        reason = f"the judge's reply has no score, such as Score: 1: {reply[-80:]!r}"
    return Outcome(None, reason=reason, status="invalid")
