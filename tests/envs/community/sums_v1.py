"""An environment as the community writes them for verifiers 0.4: typed tasks, a reward, a metric."""

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.prompt == "falls":
            raise ValueError("the score fell")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        return [SumTask(Sum(prompt=f"{i}+{i}=", answer=str(2 * i))) for i in range(8)]


__all__ = ["Sums"]
