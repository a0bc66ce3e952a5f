"""An environment as the community writes them: tools, a dataset, a rubric."""

import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def right(completion, answer) -> float:
    return float(completion[-1]["content"].strip() == answer)


def load_environment(rows: int = 8):
    data = Dataset.from_list([{"question": f"{i}*{i + 3}=", "answer": str(i * (i + 3))} for i in range(rows)])
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=data, tools=[multiply], rubric=rubric, max_turns=4, system_prompt="Use the tool.")
