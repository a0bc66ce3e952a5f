"""Episodes of several turns: ids are only appended, masks are the policy's tokens, and environments fail alone."""

import json
from functools import partial

import numpy as np
import pytest
import tokenizers

from tests.data.agent_templates import TEMPLATES
from tests.engines.reference import Plain, make_model
from tests.errors import raises
from tilth.core.random import stream
from tilth.core.trajectory import Trajectory
from tilth.data.columns import to_prompt
from tilth.data.template import ChatTemplate, TemplateError, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.grammar import added_tokens, grammar_of_calls
from tilth.engines.options import EngineOptions
from tilth.engines.request import SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.envs.calls import message_of
from tilth.envs.environment import Environment, EnvironmentFault, tool
from tilth.envs.pool import Answer
from tilth.models.config import DecoderConfig
from tilth.rollout import buffer, episodes
from tilth.rollout.episodes import Episode, EpisodeRequest, Limits, Player

TEXTS = [
    "What is 12 + 34? It is 46.\n\nThe user said so; add multiply name arguments",
    '{"name": "add", "arguments": {}}',
] * 4
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


class Talks:
    """Environments without processes: answers are a function of seed, episode and turn, and come late at random."""

    def __init__(self, seed, role="tool", turns=3, odd=None):
        self.seed, self.role, self.turns, self.odd = seed, role, turns, odd or {}
        self.waiting, self.heard, self.polls, self.ended = [], {}, 0, []

    def bits(self, *path):
        return int(stream(self.seed, "talks", *map(str, path)).bits(0, 1)[0])

    def begin(self, episode, info):
        self.heard[episode] = []
        self.waiting.append(
            Answer(episode, "begin", {"messages": [{"role": "user", "content": info["q"]}], "tools": TOOLS})
        )

    def step(self, episode, message):
        heard = self.heard[episode]
        heard.append(message)
        turn = len(heard)
        if (episode, turn) in self.odd:
            self.waiting.append(self.odd[episode, turn])
            return
        many = 1 + self.bits("many", episode, turn) % 2 if self.role == "tool" else 1
        new = [
            {"role": self.role, "content": f"answer {self.bits(episode, turn, k) % 997} <|im_end|> é"}
            for k in range(many)
        ]
        done = turn >= self.turns or self.bits("done", episode, turn) % 5 == 0
        self.waiting.append(Answer(episode, "step", {"messages": new, "done": done}))

    def reward(self, episode, cut=""):
        score = {"value": float(len(self.heard[episode])), "parts": {}, "reason": ""}
        self.waiting.append(Answer(episode, "reward", score))

    def end(self, episode):
        self.ended.append(episode)
        self.waiting = [answer for answer in self.waiting if answer.episode != episode]

    def keep_only(self, episodes):
        pass

    def poll(self, seconds):
        self.polls += 1
        late = [a for i, a in enumerate(self.waiting) if self.bits("late", self.polls, i) % 3 == 0]
        found = [a for a in self.waiting if a not in late] if seconds == 0 else list(self.waiting)
        self.waiting = [a for a in self.waiting if a not in found]
        return found


class Drawn(Plain):
    """An engine that draws ids at random and ends most turns; it knows of no model and no cache."""

    constrains = True

    def __init__(self, seed, vocabulary, ends):
        self.seed, self.ids, self.ends = seed, [i for i in range(vocabulary) if i not in ends], ends
        self.requests, self.polls = [], 0

    def bits(self, *path):
        return stream(self.seed, "drawn", *map(str, path)).bits(0, 24).tolist()

    def submit(self, requests):
        self.requests += requests

    def poll(self):
        self.polls += 1
        now = [r for r in self.requests if self.bits("late", self.polls, r.id)[0] % 2]
        self.requests = [r for r in self.requests if r not in now]
        return [self.answer(r) for r in now]

    def abort(self, id):
        self.requests.remove(next(r for r in self.requests if r.id == id))

    def answer(self, request):
        n, bits = len(request.prompt), self.bits(request.id, len(request.prompt))
        drawn = [self.ids[b % len(self.ids)] for b in bits[: 1 + bits[0] % 20]]
        stops = bits[1] % 8 > 0
        drawn = [*drawn[: request.params.max_tokens - 1], self.ends[bits[2] % len(self.ends)]] if stops else drawn
        drawn = drawn if stops else (drawn * 20)[: request.params.max_tokens]
        tokens = np.array([*request.prompt, *drawn], np.int64)
        mask = np.array([0] * n + [1] * len(drawn), np.uint8)
        logprobs = np.where(mask, -1.5, 0).astype(np.float32)
        return Trajectory(
            request.id, request.prompt_index, request.group, tokens, mask, logprobs,
            versions=[(n, 5)], finish="stop" if stops else "length",
        )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory):
    return {name: tokenizer(tmp_path_factory.mktemp(name), *facts) for name, facts in TEMPLATES.items()}


def tokenizer(folder, source, eos, special, begin):
    core = tokenizers.Tokenizer.from_str(Tokenizer.train(TEXTS, 300)._core.to_str())
    core.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in special])
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **({"bos_token": begin} if begin else {})}))
    return Tokenizer.load(folder)


def scripted(tokenizer, pool, *, turns=4, context=400, seed=1):
    template = make_template("model", tokenizer)
    engine = Drawn(seed, tokenizer.vocab_size, template.stops)
    return Player(engine, template, tokenizer, pool, Limits(turns, context))


def player(tokenizer, pool, *, turns=4, context=400, **options):
    template = make_template("model", tokenizer)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, max_positions=512,
    )  # fmt: skip
    more = {"parity": True, **options}
    engine = Engine(config, EngineOptions(tokenizer=tokenizer, seed=3, max_length=context, **more))
    engine.update_weights(make_model(config, scale=1.0).named_parameters(), version=5)
    return Player(engine, template, tokenizer, pool, Limits(turns, context))


@pytest.mark.parametrize("episodes", (20, pytest.param(334, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_appended_and_the_mask_is_on_what_the_policy_drew(tokenizers_of, name, episodes):
    tokenizer = tokenizers_of[name]
    pool = Talks(1)
    one = scripted(tokenizer, pool)
    params = SamplingParams(max_tokens=12, stop_tokens=one.template.stops)
    requests = [EpisodeRequest(i, {"q": f"What is {i}?"}, group=i // 2, prompt=i) for i in range(episodes)]
    several = 0
    for ask, found in zip(requests, one.play(requests, params), strict=True):
        t = found.trajectory
        ids = one.template.begin([{"role": "user", "content": ask.info["q"]}], TOOLS)
        assert t.tokens[: len(ids)].tolist() == ids and not t.mask[: len(ids)].any()
        at, messages = len(ids), [{"role": "user", "content": ask.info["q"]}]
        for turn in range(found.turns):
            end = at
            while end < len(t.tokens) and t.mask[end]:
                end += 1
            drawn = t.tokens[at:end].tolist()
            ended = drawn[-1] in params.stop_tokens
            assert 0 < len(drawn) <= 12 and (ended or len(drawn) == 12)
            if not ended or turn + 1 == found.turns:
                at = end
                break
            # Independent of ``follow``: the conversation is rendered whole, with the turn as the only unknown.
            answers = answers_of(pool, ask.id, turn + 1, tokenizer)
            text = between(one.template, messages, answers)
            ids = tokenizer.encode(text, special=False)
            assert t.tokens[end : end + len(ids)].tolist() == ids and not t.mask[end : end + len(ids)].any()
            messages += [message_of(tokenizer.decode(drawn[:-1], special=True)), *answers]
            at = end + len(ids)
            several += 1
        assert at == len(t.tokens) and t.versions[0][1] == 5 and len(t.versions) == 1
        assert (t.logprobs[t.mask == 1] < 0).all() and not t.logprobs[t.mask == 0].any()
        assert t.reward == len(pool.heard[ask.id])
    assert several > episodes / 2


def answers_of(pool, episode, turn, tokenizer):
    """What the environment said to a turn, as the policy reads it: special tokens in it are broken up."""
    again = Talks(pool.seed, pool.role, pool.turns)
    again.heard[episode] = [None] * (turn - 1)
    again.step(episode, None)
    said = again.waiting[0].value["messages"]
    return [{**m, "content": tokenizer.plain(m["content"])} for m in said]


def between(template, messages, answers):
    """What the template puts behind the end token of a turn whose content is a lone letter."""
    call = {"id": "123456789", "type": "function", "function": {"name": "Z", "arguments": {}}}
    messages = [m if m["role"] == "user" else called(m) for m in messages]
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = template._render([*messages, turn, *map(called, answers)], True, TOOLS)
    start = text.rindex('"name": "Z"')
    end = min(text.index(e, start) + len(e) for e in template._ends if e in text[start:])
    return text[end:].replace("123456789", "tilth0000")


def called(message):
    """A message as strict templates want it: each tool's answer has a call, each turn of the policy makes one."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": "123456789"}
    one = {"id": "123456789", "type": "function", "function": {"name": "Y", "arguments": {}}}
    return {**message, "tool_calls": [one]}


def test_text_tokenised_again_gives_other_ids(tokenizers_of):
    """Why ids are appended: text of the same conversation, rendered and tokenised, is not what the policy drew."""
    tokenizer = tokenizers_of["qwen3"]
    one = scripted(tokenizer, Talks(1))
    params = SamplingParams(max_tokens=12, stop_tokens=one.template.stops)
    found = one.play([EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(20)], params)
    again = [tokenizer.encode(tokenizer.decode(f.trajectory.tokens, special=True)) for f in found]
    assert sum(ids != f.trajectory.tokens.tolist() for ids, f in zip(again, found)) > 10


def test_order_of_answers_changes_nothing(tokenizers_of):
    """In parity mode: neither when environments answer nor how many rows there are."""
    tokenizer = tokenizers_of["llama3"]
    found = []
    for rows, only in ((64, range(12)), (3, range(12)), (8, (5,))):
        one = player(tokenizer, Talks(2), max_rows=rows)
        params = SamplingParams(max_tokens=8, stop_tokens=(*one.template.stops, *range(5, 100)))
        results = one.play([EpisodeRequest(i, {"q": f"What is {i}?"}) for i in only], params)
        found.append({p.trajectory.id: p.trajectory for p in results})
    for i, t in found[0].items():
        for other in (o[i] for o in found[1:] if i in o):
            assert np.array_equal(t.tokens, other.tokens) and np.array_equal(t.logprobs, other.logprobs)
            assert t.segments == other.segments and t.reward == other.reward


def advanced(one, rounds, others=()):
    """Advance rounds until all episodes have ended; return their results. others: rounds behind which these are set
    aside, and another one is played."""
    for number in range(1000):
        if not rounds.busy:
            return {i: result for i, result in one.results.items() if i < 100}
        rounds.advance()
        if number in others:
            flying, params = rounds.pause(), SamplingParams(max_tokens=4, temperature=0.0)
            one.set_aside()
            one.play([EpisodeRequest(100 + number, {"q": "What else?"})], params)
            turns = one.take_up()
            for trajectory in flying:
                rounds.resume(trajectory, turns[trajectory.id])
    raise AssertionError("they do not end")


def test_episodes_that_are_set_aside_go_on_with_the_same_tokens(tokenizers_of):
    """Turns in flight too; environments that answer meanwhile are heard afterwards."""
    found = []
    for others in ((), (1, 4, 5, 9, 14)):
        pool = Talks(2)
        one = player(tokenizers_of["llama3"], pool, max_rows=3)
        params = SamplingParams(max_tokens=8, stop_tokens=(*one.template.stops, *range(5, 100)))
        one.begin([EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(6)], params)
        found.append(advanced(one, EngineRounds(one.engine, source=one), others))
        assert sorted(i for i in pool.ended if i < 100) == list(range(6))
    plain, aside = found
    assert plain.keys() == aside.keys() == set(range(6))
    for i, one in plain.items():
        t, other = one.trajectory, aside[i].trajectory
        assert np.array_equal(t.tokens, other.tokens) and np.array_equal(t.logprobs, other.logprobs)
        assert t.segments == other.segments and t.versions == other.versions and t.reward == other.reward


def test_discarded_episodes_end_their_environments_and_leave_the_others_as_they_are(tokenizers_of):
    params = SamplingParams(max_tokens=12)
    requests = [EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(6)]
    whole = scripted(tokenizers_of["qwen3"], Talks(4)).play(requests, params)
    one = scripted(tokenizers_of["qwen3"], Talks(4))
    rounds = EngineRounds(one.engine, source=one)
    one.begin(requests, params)
    for _ in range(3):
        rounds.advance()
    gone = [i for i in (1, 2, 4) if i not in one.results]
    assert gone and len(rounds)
    rounds.discard(one.discard(gone))
    assert set(gone) <= set(one.pool.ended)
    found = advanced(one, rounds)
    assert found.keys() == set(range(6)) - set(gone)
    for i, result in found.items():
        assert np.array_equal(result.trajectory.tokens, whole[i].trajectory.tokens)


def test_a_failed_episode_fails_alone(tokenizers_of):
    tokenizer = tokenizers_of["qwen3"]
    odd = {(2, 1): Answer(2, "step", None, "ValueError: no", "error")}
    plain = scripted(tokenizer, Talks(4))
    params = SamplingParams(max_tokens=8, stop_tokens=plain.template.stops)
    requests = [EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(6)]
    whole = plain.play(requests, params)
    hit = scripted(tokenizer, Talks(4, odd=odd)).play(requests, params)
    assert hit[2].trajectory.reward is None and hit[2].trajectory.finish == "error" and hit[2].status == "error"
    assert hit[2].reason == "ValueError: no" and hit[2].trajectory.mask.any()
    for a, b in zip(whole[:2] + whole[3:], hit[:2] + hit[3:]):
        assert np.array_equal(a.trajectory.tokens, b.trajectory.tokens) and a.trajectory.reward == b.trajectory.reward


def test_an_episode_that_fails_while_its_turn_is_drawn_fails_alone(tokenizers_of):
    """Its environment was lost, and did not repeat itself elsewhere."""
    tokenizer = tokenizers_of["qwen3"]
    plain, hit = (scripted(tokenizer, Talks(4)) for _ in range(2))
    params = SamplingParams(max_tokens=8, stop_tokens=plain.template.stops)
    requests = [EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(6)]
    talks = hit.pool.poll

    def poll(seconds):
        lost = len(hit.pool.heard[2]) == 1 and 2 in [r.id for r in hit.engine.requests]
        return talks(seconds) + [Answer(2, "step", None, "it differs", "differs")] * lost

    hit.pool.poll = poll
    whole, found = plain.play(requests, params), hit.play(requests, params)
    assert found[2].status == "differs" and found[2].trajectory.reward is None and not hit.engine.requests
    for a, b in zip(whole[:2] + whole[3:], found[:2] + found[3:]):
        assert np.array_equal(a.trajectory.tokens, b.trajectory.tokens) and a.trajectory.reward == b.trajectory.reward


def test_an_answer_longer_than_the_context_cuts_the_episode(tokenizers_of):
    tokenizer = tokenizers_of["qwen3"]
    long = {"messages": [{"role": "tool", "content": "x y z " * 400}], "done": False}
    one = scripted(tokenizer, Talks(4, odd={(i, 1): Answer(i, "step", long) for i in range(8)}))
    params = SamplingParams(max_tokens=8, stop_tokens=one.template.stops)
    results = one.play([EpisodeRequest(i, {"q": "What is 1?"}) for i in range(8)], params)
    found = next(p for p in results if "cut" not in p.reason)
    assert found.trajectory.finish == "length" and "context of 400" in found.reason
    assert found.trajectory.reward is not None and found.trajectory.mask[-1] == 1


def test_a_template_that_writes_turns_anew_is_refused(tokenizers_of):
    """Qwen3's leaves out what was thought when the user speaks again, and keeps it when a tool answers."""
    template = make_template("model", tokenizers_of["qwen3"])
    assert template.follow([{"role": "tool", "content": "one"}], TOOLS)
    with raises(TemplateError, "template.prefix"):
        template.follow([{"role": "user", "content": "and 2?"}], TOOLS)


def test_what_a_template_does_not_take_costs_its_episode_only(tokenizers_of):
    """A system's message in the middle, as many templates refuse it."""
    strict = "{%- if messages[-1].role == 'system' %}{{- raise_exception('system comes first') }}{%- endif %}"
    late = {"messages": [{"role": "system", "content": "late"}], "done": False}
    one = scripted(tokenizers_of["qwen3"], Talks(4, odd={(i, 1): Answer(i, "step", late) for i in range(4)}))
    one.template = ChatTemplate(one.template.tokenizer, strict + one.template.source, "strict")
    params = SamplingParams(max_tokens=8, stop_tokens=one.template.stops)
    results = one.play([EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(8)], params)
    refused = [p for p in results if p.trajectory.reward is None]
    assert 0 < len(refused) <= 4 and all("user, assistant, system: system comes first" in p.reason for p in refused)


def test_what_an_environment_says_has_no_special_tokens(tokenizers_of):
    for name, tokenizer in tokenizers_of.items():
        template = make_template("model", tokenizer)
        end = tokenizer.token(template.stops[0])
        plain, tricky = (template.begin([{"role": "user", "content": text}]) for text in ("a", f"a{end}"))
        assert tricky.count(template.stops[0]) == plain.count(template.stops[0]), name


def test_tools_need_a_template_that_lists_them(tmp_path):
    for name in (str(tmp_path / "bare.jinja"), ""):
        (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}")
        template = make_template(name, Tokenizer.train(TEXTS, 300))
        with raises(TemplateError, "template.tools"):
            template.begin([{"role": "user", "content": "What is 1?"}], TOOLS)


def test_what_was_computed_is_not_computed_again(tokenizers_of):
    """Each turn computes what is new: what the environment said, and the policy's last token."""
    tokenizer = tokenizers_of["qwen3"]
    one = player(tokenizer, Talks(4), parity=False)
    params = SamplingParams(max_tokens=12, stop_tokens=(*one.template.stops, *range(5, 100)))
    found = one.play([EpisodeRequest(i, {"q": f"What is {i}?"}) for i in range(16)], params)
    read = sum(int((p.trajectory.mask == 0).sum()) for p in found)
    turns = sum(p.turns for p in found)
    assert one.engine.stats().prefilled_tokens <= read + turns - len(found)


def test_text_without_tokens_costs_its_episode_only():
    """Characters that a tokenizer of characters does not have, at the beginning and in an answer."""
    tokenizer = Tokenizer.characters("0123456789+=")
    odd = {(1, 1): Answer(1, "step", {"messages": [{"role": "user", "content": "a b"}], "done": False})}

    class Sums(Talks):
        def begin(self, episode, info):
            self.heard[episode] = []
            text = "why?" if episode == 2 else "1+1="
            self.waiting.append(
                Answer(episode, "begin", {"messages": [{"role": "user", "content": text}], "tools": []})
            )

        def step(self, episode, message):
            super().step(episode, message)
            for answer in self.waiting[-1:]:
                if (episode, len(self.heard[episode])) not in self.odd and answer.op == "step":
                    answer.value["messages"] = [{"role": "user", "content": "2+2="}]

    one = scripted_plain(tokenizer, Sums(4, odd=odd))
    params = SamplingParams(max_tokens=8, stop_tokens=one.template.stops)
    found = one.play([EpisodeRequest(i, {"q": ""}) for i in range(4)], params)
    assert [p.status for p in found] == ["ok", "error", "error", "ok"] or found[1].reason.endswith("was cut")
    assert found[2].trajectory.reward is None and "no token" in found[2].reason


def scripted_plain(tokenizer, pool):
    template = make_template("", tokenizer)
    return Player(Drawn(1, tokenizer.vocab_size, template.stops), template, tokenizer, pool, Limits(4, 200))


class Pays(Talks):
    """Rewards every second turn, and the whole."""

    def step(self, episode, message):
        super().step(episode, message)
        turn = len(self.heard[episode])
        if turn % 2:
            self.waiting[-1].value["reward"] = float(turn + episode)


def drawn(one, count):
    """Play this many episodes."""
    params = SamplingParams(max_tokens=12, stop_tokens=one.template.stops)
    return one.play([EpisodeRequest(i, {"q": f"{i}?"}) for i in range(count)], params)


def test_rewards_of_turns_are_at_their_last_tokens(tokenizers_of):
    """Every segment of the policy against what the environment paid, in an order of its own."""
    pool = Pays(5)
    results = drawn(scripted(tokenizers_of["qwen3"], pool), 40)
    several = 0
    for one in results:
        t = one.trajectory
        chosen = np.flatnonzero(t.mask)
        ends = [i for i in chosen if i + 1 == len(t.mask) or not t.mask[i + 1]]
        paid = [float(turn + t.id) if turn % 2 else 0.0 for turn in range(1, one.turns + 1)]
        assert len(ends) == one.turns == len(pool.heard[t.id])
        assert {i: r for i, r in zip(ends, paid) if r} == dict(t.turn_rewards)
        assert t.reward == one.turns + sum(paid) and t.token_rewards().sum() == sum(paid)
        several += len(t.turn_rewards) > 1
    assert several > 5


def test_a_missing_reward_is_missing_whatever_turns_have_earned(tokenizers_of):
    pool = Pays(5, odd={(3, 2): Answer(3, "step", None, "as asked", "error")})
    results = drawn(scripted(tokenizers_of["qwen3"], pool), 6)
    assert results[3].trajectory.reward is None and results[3].trajectory.turn_rewards


def test_calls_are_constrained_to_tools_that_there_are(tokenizers_of):
    tokenizer = tokenizers_of["qwen3"]
    one = scripted(tokenizer, Talks(4))
    one.constrained, one._added, asked = True, added_tokens(tokenizer), []
    inner = one.engine.submit
    one.engine.submit = lambda requests: (asked.extend(requests), inner(requests))
    drawn(one, 4)
    assert {r.params.schema for r in asked} == {grammar_of_calls(json.dumps(TOOLS), added_tokens(tokenizer))}
    with raises(EnvironmentFault, "rollout.tool_schemas.none"):
        one._schema(Episode(EpisodeRequest(0, {})))
    assert one._schema(Episode(EpisodeRequest(0, {}), limits={})) == ""  # an agent's call without tools


class Endless(Talks):
    """Environments that never end an episode."""

    def step(self, episode, message):
        super().step(episode, message)
        self.waiting[-1].value["done"] = False


class Short(Drawn):
    """An engine whose turns all have five tokens."""

    def bits(self, *path):
        return [5] * 24


class Counted:
    """numpy that counts the numbers of all arrays it returns."""

    def __init__(self):
        self.numbers = 0

    def __getattr__(self, name):
        value = getattr(np, name)
        return value if isinstance(value, type) or not callable(value) else partial(self.call, value)

    def call(self, function, *given, **more):
        found = function(*given, **more)
        self.numbers += getattr(found, "size", 0)
        return found


def test_turns_copy_new_tokens_alone(tokenizers_of, monkeypatch):
    """Numbers copied are linear in tokens, not in tokens times turns."""
    counts = []
    for turns in (8, 64):
        counted = Counted()
        for module in (episodes, buffer):
            monkeypatch.setattr(module, "np", counted)
        tokenizer = tokenizers_of["qwen3"]
        one = scripted(tokenizer, Endless(1), turns=turns, context=10**6)
        one.engine = Short(1, tokenizer.vocab_size, one.template.stops)
        (result,) = drawn(one, 1)
        assert result.turns == turns
        counts.append(counted.numbers / len(result.trajectory.tokens))
    assert counts[1] < 1.5 * counts[0]


# ---- what is learnt of transcripts is what episodes have ----


class Shelves(Environment, declares=False):
    """What the transcripts below were made with."""

    @tool
    def look(self, shelf: int, why: str | None = None) -> str:
        """Look at a shelf."""
        return f"nut {shelf}"

    @tool
    def take(self, item: str) -> str:
        """Take an item."""
        return f"took {item}"

    def reward(self):
        return 1.0


class Lived(Talks):
    """A pool with one environment in this process."""

    def begin(self, episode, info):
        self.one = Shelves()
        tools = [known.schema for known in self.one.tools().values()]
        self.waiting.append(Answer(episode, "begin", {"messages": self.one.reset(info), "tools": tools}))

    def step(self, episode, message):
        new, done = self.one.step(message)
        self.waiting.append(Answer(episode, "step", {"messages": new, "done": done}))

    def reward(self, episode, cut=""):
        self.waiting.append(Answer(episode, "reward", {"value": self.one.reward(), "parts": {}, "reason": cut}))


class Recites(Drawn):
    """An engine that writes the turns of an example."""

    def __init__(self, example, ends):
        super().__init__(0, 1, ends)
        self.example = example

    def answer(self, request):
        n = len(request.prompt)
        assert request.prompt.tolist() == self.example.tokens[:n].tolist()
        end = n + int(np.argmin([*self.example.mask[n:], 0]))
        assert end > n
        tokens, mask = self.example.tokens[:end], np.array([0] * n + [1] * (end - n), np.uint8)
        return Trajectory(request.id, 0, 0, tokens, mask, np.zeros(end, np.float32), versions=[(n, 5)], finish="stop")


RECORD = {"messages": [
    {"role": "system", "content": "Use the shelves."},
    {"role": "user", "content": "Take what is on shelf 2."},
    {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "look", "arguments": '{"shelf": 2}'}}]},
    {"role": "tool", "content": "nut 2"},
    {"role": "assistant", "tool_calls": [{"name": "take", "arguments": {"item": "nut 2", "shelf": None}}]},
    {"role": "tool", "content": "took nut 2"},
    {"role": "assistant", "content": "It is mine."},
]}  # fmt: skip


@pytest.mark.parametrize("brought", [True, False])
@pytest.mark.parametrize("name", [*TEMPLATES, "chatml"])
def test_an_example_of_a_transcript_is_the_episode_token_for_token(tokenizers_of, name, brought):
    tokenizer = tokenizers_of.get(name) or Tokenizer.train(TEXTS, 300)
    schemas = [known.schema for known in Shelves().tools().values()]
    record = {**RECORD, "tools": json.dumps(schemas)} if brought else RECORD
    prompt = to_prompt(record, 0, "d.jsonl:1", {})
    template = make_template("chatml" if name == "chatml" else "model", tokenizer, () if brought else schemas)
    (example,) = template.examples([prompt])
    own = make_template("chatml" if name == "chatml" else "model", tokenizer)
    player = Player(Recites(example, own.stops), own, tokenizer, Lived(1), Limits(4, 2000))
    params = SamplingParams(max_tokens=200, stop_tokens=own.stops)
    (result,) = player.play([EpisodeRequest(0, json.loads(prompt.episode))], params)
    assert (result.turns, result.calls, result.reason) == (3, 2, "")
    assert result.trajectory.tokens.tolist() == example.tokens.tolist()
    assert result.trajectory.mask.tolist() == example.mask.tolist()
    written = [part for part in tokenizer.decode(example.tokens[example.mask == 1], special=True).split(
        tokenizer.token(own.stops[0])) if part]  # fmt: skip
    assert len(written) == 3 and "look" in written[0] and "nut 2" in written[1] and written[2].endswith("It is mine.")
