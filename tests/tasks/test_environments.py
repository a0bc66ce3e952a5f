"""The environments of Tilth's tasks pay for what their worked conversations do."""

import pytest

from tilth.config.plugins import shipped_tasks
from tilth.config.tasks import task_of
from tilth.envs.calls import message_of
from tilth.tasks.retrieval import TextIndex
from tilth.tasks.word_game import place

PLAYED = [name for name in shipped_tasks() if task_of(name).environment]


def test_there_are_some():
    assert {"calculator", "word_game", "retrieval"} <= set(PLAYED)


@pytest.mark.parametrize("name", PLAYED)
def test_a_worked_conversation_is_what_the_environment_says_and_pays(name):
    task = task_of(name)
    prompts = task.prompts(**({"digits": 2} if name == "calculator" else {}))
    for index in range(0, len(prompts), max(1, len(prompts) // 40)):
        prompt = prompts.prompt(index)
        one = task.environment()
        said = list(one.reset({**prompt.info, "prompt": prompt.text}))
        done = False
        for turn in (t for t in prompt.messages if t["role"] == "assistant"):
            assert not done
            said.append(turn)
            more, done = one.step(message_of(turn["content"]))
            said += [] if done else more
        assert done and [(m["role"], m["content"]) for m in said] == [
            (m["role"], m["content"]) for m in prompt.messages
        ]
        assert one.reward()["reward"] > 0


def test_the_last_search_finds_the_answer():
    prompts = task_of("retrieval").prompts()
    for prompt in map(prompts.prompt, range(0, len(prompts), 37)):
        assert prompt.messages[-2]["role"] == "tool" and prompt.answer in prompt.messages[-2]["content"].split()


@pytest.mark.parametrize(
    "guess, secret, said", [("bak", "bak", "found"), ("dot", "bak", "before"), ("ban", "bat", "after")]
)
def test_places(guess, secret, said):
    assert place(guess, secret) == said


def test_the_index_finds_the_rarest_words():
    index = TextIndex(("a dog is here", "a cat is here", "the cat sees the dog"))
    assert index.search("dog here") == ["a dog is here"] and index.search("xyz") == []
    assert len(index.search("is", 5)) == 2
