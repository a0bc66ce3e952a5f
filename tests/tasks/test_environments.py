"""The environments of Tilth's tasks pay for what their worked conversations do."""

import math

import pytest

from tilth.config.plugins import shipped_tasks
from tilth.config.schema import DataConfig
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
    prompts = task.make_prompts(DataConfig(source=name, digits=2, flawed=0.0))
    for index in range(0, len(prompts), max(1, len(prompts) // 12)):
        prompt = prompts.prompt(index)
        one = task.environment()
        said = list(one.reset({**prompt.info, "prompt": prompt.text}))
        done = False
        for turn in (t for t in prompt.messages if t["role"] == "assistant"):
            assert not done
            said.append(turn)
            more, done, *_ = one.step(message_of(turn["content"]))
            said += [] if done else more
        assert done and [(m["role"], m["content"]) for m in said] == [
            (m["role"], m["content"]) for m in prompt.messages
        ]
        assert one.reward()["reward"] > 0


@pytest.mark.parametrize("name", PLAYED)
def test_a_flawed_conversation_does_not_pay(name):
    task, pays = task_of(name), []
    prompts = task.make_prompts(DataConfig(source=name, digits=2, flawed=0.7))
    for index in range(1, 1201, 30):
        prompt, one = prompts.prompt(index), task.environment()
        one.reset({**prompt.info, "prompt": prompt.text})
        for turn in (t for t in prompt.messages if t["role"] == "assistant"):
            one.step(message_of(turn["content"]))
        pays.append(one.reward()["reward"])
    assert 0.15 < sum(pays) / len(pays) < 0.5  # a game that forgets may find the word before it does


def test_a_game_pays_a_half_for_the_word_and_a_half_for_what_is_known_of_it():
    game = task_of("word_game").environment()
    game.reset({"answer": "dik"})
    earned = [game.step({"content": word})[2] for word in ("dot", "xx", "bat", "dek")]
    assert earned[0] == pytest.approx(0.5 * math.log(36 / 23) / math.log(36)) and earned[1] == 0.0
    assert game.reward() == {"reward": 0.0, "correct": 0.0} and sum(earned) < 0.5
    earned.append(game.step({"content": "dik"})[2])
    assert sum(earned) + game.reward()["reward"] == pytest.approx(1.0)


def test_the_last_search_finds_the_answer():
    prompts = task_of("retrieval").prompts(flawed=0.0)
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
