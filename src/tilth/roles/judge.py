"""Judge role: a frozen model that reads the steps of right answers and names the first wrong one (FAPO)."""

import numpy as np

from tilth.cluster.protocol import transfer
from tilth.config.schema import JudgeConfig as JudgeSection
from tilth.core.batch import Batch, Store
from tilth.core.errors import DataError
from tilth.data.columns import Prompt
from tilth.data.template import Template
from tilth.rewards.judging import question, steps, verdict
from tilth.roles.experience import texts
from tilth.rollout.protocol import GenerationEngine
from tilth.rollout.request import Request, SamplingParams
from tilth.trace.spans import span

VERDICT = "verdict"
"""Row column of a judged batch: index of the first wrong step, -1 none, NaN without a usable verdict."""
JUDGED_BY = "judged_by"
"""Row column beside it: the training step of the judge's checkpoint."""


class JudgeWorker:
    """Generation engine with the judge's weights and template.

    Verdicts are greedy, so a repeated step gets the same ones.
    """

    def __init__(self, engine: GenerationEngine, template: Template, section: JudgeSection, store: Store) -> None:
        self.engine, self.template, self.section, self.store = engine, template, section, store

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
            replies = {t.id: t.text for t in self.engine.generate(requests)}
            spent.set(tokens=sum(len(request.prompt) for request in requests))
        found = [verdict(replies.get(i, ""), len(s)) for i, s in zip(batch["id"].tolist(), written)]
        rows = {VERDICT: np.array([np.nan if v is None else v for v in found], np.float32)}
        rows[JUDGED_BY] = np.full(len(batch), self.engine.version, np.int64)
        return batch.with_rows(**rows)

    def _ask(self, id: int, prompt: str, answer: str, written: list[str]) -> Request | None:
        """Return the question about one solution; None if the judge cannot be asked about it."""
        text = question(prompt, answer, written)
        try:
            ids = self.template.prompts([Prompt(id, text)])[0] if written else []
        except DataError:  # a character that the judge has no token for
            return None
        room = min(self.section.max_tokens, self.engine.max_length - len(ids))
        if not ids or room < 1:
            return None
        return Request(id=id, prompt=ids, params=SamplingParams(room, 0.0, stop_tokens=self.template.stops))
