"""Judge role: a frozen model that grades answers by a rubric, or names the first wrong step of right ones (FAPO)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from tilth.cluster.protocol import transfer
from tilth.config.schema import JudgeConfig as JudgeSection
from tilth.core.batch import Batch, Store
from tilth.core.errors import DataError
from tilth.core.trajectory import Trajectory
from tilth.data.columns import Prompt
from tilth.data.prompts import PromptSet
from tilth.data.template import Template
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.rewards.functions import LARGEST
from tilth.rewards.judging import grade, grading, question, steps, verdict
from tilth.rewards.process_pool import Item, Outcome
from tilth.roles.experience import OUTCOME, samples_of, texts
from tilth.roles.rollout import LIMITS, Ended
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
        self.rounds = EngineRounds(engine, LIMITS)
        self._failures: dict[int, dict[str, Any]] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        """Request of ``advance`` in flight -> its sample (id, checksum), if somebody wants its score."""
        self._scores: dict[tuple[int, int], Outcome] = {}
        """Scores of samples of ``advance``, until ``settle`` or ``forget``."""

    @transfer(split="rows", gather="rows", over=("dp",))
    def verdicts(self, batch: Batch) -> Batch:
        """Fill in the row columns ``verdict`` and ``judged_by`` from the payload text, prompt_text and answer.

        The verdict is NaN for a solution that does not fit, that the judge's tokens cannot express, or whose answer
        names no step.
        """
        columns = batch.read(self.store, "text", "prompt_text", "answer")
        solutions, prompts, answers = (texts(column) for column in columns.values())
        written = [steps(text) for text in solutions]
        asked = [(int(i), question(p, a, s)) for i, p, a, s in zip(batch["id"], prompts, answers, written) if s]
        replies = self._replies(self._requests(asked))
        found = [verdict(replies.get(i, ""), len(s)) for i, s in zip(batch["id"].tolist(), written)]
        rows = {VERDICT: np.array([np.nan if v is None else v for v in found], np.float32)}
        rows[JUDGED_BY] = np.full(len(batch), self.engine.version, np.int64)
        return batch.with_rows(**rows)

    @transfer(split="all", gather="merge")
    def advance(self, samples: Mapping[int, Ended]) -> dict[str, Any]:
        """Take this engine's share of samples that a generation has finished, and grade for a round, where an order of
        finishing changes no score."""
        if self.prompts is None:
            return {}
        number, count = self.share
        mine = {i: one for i, one in samples.items() if i % count == number}
        known = {i: self.prompts[one.prompt] for i, one in mine.items()}
        items = [(i, known[i].text, one.text, known[i].info) for i, one in mine.items()]
        self._asked |= {i: (i, one.checksum) for i, one in mine.items()}
        requests = self._questions(items)
        self._scores |= {self._asked.pop(i): _graded(None) for i in mine.keys() - {r.id for r in requests}}
        with span("judge", tokens=sum(len(request.prompt) for request in requests)):
            self.rounds.submit(requests)
            self._take(self.rounds.advance().finished)
        return {}

    @transfer(split="all", gather="merge")
    def settle(self, samples: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Outcome]:
        """Return the scores of those of these samples (id, checksum) that ``advance`` has taken, and forget them."""
        with span("judge"):
            while not {*samples}.isdisjoint(self._asked.values()):
                self._take(self.rounds.advance().finished)
        return {sample: self._scores.pop(sample) for sample in samples if sample in self._scores}

    @transfer(split="all", gather="merge")
    def forget(self, samples: Sequence[tuple[int, int]] | None = None) -> dict[str, Any]:
        """Drop samples of ``advance`` that nobody asks ``settle`` for any more; None: all, and what is in flight."""
        if samples is None:
            self.rounds.drop()
            self.engine.reset_prefix_cache()  # as in ``verdicts``
            self._scores, self._asked = {}, {}
            return {}
        self._asked = {i: sample for i, sample in self._asked.items() if sample not in samples}
        for sample in samples:
            self._scores.pop(sample, None)
        return {}

    def _take(self, finished: Iterable[Trajectory]) -> None:
        self._scores |= {self._asked.pop(t.id): _graded(t.text) for t in finished if t.id in self._asked}

    @transfer(split="rows", gather="rows", over=("dp",))
    def grade(self, batch: Batch, *, alone: bool, known: dict[tuple[int, int], Outcome] | None = None) -> Batch:
        """Add the judge's score to the row column ``reward``, and as ``part/judge``; NaN: missing.

        alone: there is no other reward, so that this is the ``outcome`` too. known: of ``settle``, not asked again. An
        answer that the judge cannot be asked about, and a reply without a score, make the reward missing: ``failures``
        says why.
        """
        columns = batch.read(self.store, "text", "prompt_text", "answer")
        completions, prompts, answers = (texts(column) for column in columns.values())
        found = dict(known or {})
        samples = samples_of(batch)
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
        replies = self._replies(self._questions(items))
        return [_graded(replies.get(cast(int, item[0]))) for item in items]

    def _questions(self, items: Sequence[Item]) -> list[Request]:
        """Return the requests of those of these answers that the judge can read."""
        rubric = self.section.rubric
        asked = [(i, grading(rubric, prompt, str(info.get("answer", "")), text)) for i, prompt, text, info in items]
        return self._requests(cast(list[tuple[int, str]], asked))

    def _replies(self, requests: Sequence[Request]) -> dict[int, str]:
        """Return the texts of replies by the ids of their requests."""
        with span("judge", tokens=sum(len(request.prompt) for request in requests)):
            self.engine.reset_prefix_cache()  # no trace of earlier steps, so that a resumed run does the same work
            self.rounds.submit(requests)
            replies, left = dict[int, str](), {request.id for request in requests}
            while left:
                finished = self.rounds.advance().finished
                replies |= {t.id: t.text for t in finished if t.id in left}
                left -= replies.keys()
                self._take(finished)  # what ``advance`` has taken of other samples
            return replies

    @transfer(split="all", gather="merge")
    def failures(self) -> dict[int, dict[str, Any]]:
        """Return reason and status of the answers of the last ``grade`` without a score, by trajectory id."""
        return self._failures

    def _requests(self, asked: Iterable[tuple[int, str]]) -> list[Request]:
        """Return the requests of those of these prompts, by id, that the judge can read."""
        return [request for id, text in asked if (request := self._request(id, text)) is not None]

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
