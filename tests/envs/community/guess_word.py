"""A game as the community writes them: turns, an end, a score."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    @vf.stop
    async def found(self, state) -> bool:
        return state["tries"] > 0 and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        said = messages[-1]["content"]
        if said == "boom":
            raise vf.Error("the game broke")
        if said == "forget":
            messages[-1]["content"] = "nothing"
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
        return [{"role": "user", "content": f"{state['tries']}: " + ("before" if state["answer"] < said else "after")}]


async def score(state, answer, completion) -> float:
    return float(any(m["role"] == "assistant" and m["content"] == answer for m in completion)) - 0.1 * state["tries"]


def load_environment():
    data = Dataset.from_list([{"question": "?", "answer": "bat"}])
    return Guess(dataset=data, rubric=vf.Rubric(funcs=[score]), max_turns=6)
