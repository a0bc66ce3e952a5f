"""Conversations become the ids that transformers makes of them, masked as it masks them, or a named error."""

import json
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.data.prompts import Prompt, PromptSet
from tilth.data.template import CHATML, TemplateError, make_template, transcript
from tilth.data.tokenizer import Tokenizer
from tilth.envs.calls import ToolCall, parse_calls

transformers = pytest.importorskip("transformers")

QWEN25 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

LLAMA2 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] | trim + eos_token }}{%- endgeneration %}
    {%- else %}{{- raise_exception('only user and assistant') }}
    {%- endif %}
{%- endfor %}
"""

PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}
    {%- else %}{{- message['content'] + '<|end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and '</think>' in message.content and loop.index0 < ns.last %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

IM = ("<|im_start|>", "<|im_end|>")
CHATS = {
    "chatml": (CHATML, "<|im_end|>", IM),
    "qwen2.5": (QWEN25, "<|im_end|>", IM),
    "llama3": (
        LLAMA3,
        "<|end_of_text|>",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "llama2": (LLAMA2, "</s>", ("<s>", "</s>")),
    "phi3": (PHI3, "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
}
TEXTS = [
    "What is 12 + 34? It is 46, and that is right.\n\nThe user said so; the assistant did, too.",
    "[INST] system You are a helpful assistant. Today Date: 26 Jul 2024",
    "one two three four\nfive six seven eight  nine\n",
    "one\n\ntwo\n\nthree",
] * 3
BEGIN = {"llama3": "<|begin_of_text|>", "llama2": "<s>"}


def turns(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    said = [{"role": r, "content": c} for r, c in zip(roles, contents)]
    return [{"role": "system", "content": system}, *said] if system else said


TALKS = [
    turns("What is 12 + 34?", "46"),
    turns("one", "two", "three", "four five six", "seven\n", "eight"),
    turns("  spaces  ", "one\ntwo\n\nthree ", "", "four"),
]


def asked(*talks):
    return [Prompt(i, "", talk[-1]["content"], {}, tuple(talk)) for i, talk in enumerate(talks)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """name -> (our tokenizer, that of transformers): of one directory, with a template in it."""
    return {name: chat(tmp_path_factory.mktemp("chat"), name, *CHATS[name]) for name in CHATS}


def chat(folder, name, source, eos, special):
    core = tokenizers.Tokenizer.from_str(Tokenizer.train(TEXTS, 400)._core.to_str())
    core.add_special_tokens([tokenizers.AddedToken(t, rstrip=name == "phi3", normalized=False) for t in special])
    if name == "llama2":  # a space is put before every text, as in SentencePiece
        core.normalizer = normalizers.Prepend(" ")
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": source}
    if name in BEGIN:
        config["bos_token"] = BEGIN[name]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)


def theirs(other, talk, **how):
    found = other.apply_chat_template(talk, return_dict=True, date_string="26 Jul 2024", **how)
    return found["input_ids"], found.get("assistant_masks")


# ---- ids and masks are those of transformers ----


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("talk", TALKS)
def test_ids_and_mask_equal_those_of_transformers(chats, name, talk):
    ours, other = chats[name]
    template = make_template("model", ours)
    (example,) = template.examples(asked(talk))
    ids, mask = theirs(other, talk, return_assistant_tokens_mask=True)
    n = len(example.tokens)
    assert example.tokens.tolist() == ids[:n] and example.tokens.dtype == np.int64
    assert example.mask.tolist() == mask[:n] and example.mask.dtype == np.uint8
    assert other.decode(ids[n:]).strip() == "" and example.tokens[-1] in template.stops and example.mask[-1] == 1


@pytest.mark.parametrize("name", CHATS)
def test_a_prompt_is_the_conversation_up_to_where_the_assistant_speaks(chats, name):
    ours, other = chats[name]
    for talk in TALKS:
        (ids,) = make_template("model", ours).prompts(asked(talk))
        assert ids == theirs(other, talk[:-1], add_generation_prompt=True)[0]


def test_a_system_message_takes_the_place_of_the_default_one(chats):
    ours, other = chats["qwen2.5"]
    template = make_template("model", ours)
    for talk, count in ((turns("one", "two"), 1), (turns("one", "two", system="three"), 0)):
        (example,) = template.examples(asked(talk))
        assert example.tokens.tolist() == theirs(other, talk)[0][: len(example.tokens)]
        assert ours.decode(example.tokens).count("You are a helpful assistant.") == count


def test_what_follows_the_end_token_is_not_the_policys(chats):
    ours, _ = chats["chatml"]
    template = make_template("chatml", ours)
    (example,) = template.examples(asked(turns("a", "b", "c", "d")))
    said = [ours.decode(example.tokens[example.mask == v], special=True) for v in (0, 1)]
    assert said[1] == "b<|im_end|>d<|im_end|>"
    assert said[0] == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", CHATS)
def test_a_record_without_messages_is_a_question_and_its_answer(chats, name):
    template = make_template("model", chats[name][0])
    plain = list(PromptSet.of([{"prompt": "one", "answer": "two"}]))
    spoken = asked(turns("one", "two"))
    assert template.prompts(plain) == template.prompts(spoken)
    for a, b in zip(template.examples(plain)[0], template.examples(spoken)[0]):
        assert a.tolist() == b.tolist()


def test_templates_are_told_a_fixed_day(chats):
    ours, _ = chats["llama3"]
    (ids,) = make_template("model", ours).prompts(asked(turns("one", "two")))
    assert "Today Date: 26 Jul 2024" in ours.decode(ids)


# ---- what is trained is what is generated ----

CONTENT = st.text("ab 1\n\t=é", max_size=12)


@pytest.mark.parametrize("name", CHATS)
@settings(max_examples=examples(40), deadline=None)
@given(contents=st.lists(CONTENT, min_size=2, max_size=6).filter(lambda c: len(c) % 2 == 0))
def test_ids_of_a_conversation_so_far_begin_the_longer_one(chats, name, contents):
    template = make_template("model", chats[name][0])
    talks = [turns(*contents[:n]) for n in range(2, len(contents) + 1, 2)]
    examples = template.examples(asked(*talks))
    for prompt, example in zip(template.prompts(asked(*talks)), examples):
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert example.mask[len(prompt) :].all() and len(example.tokens) > len(prompt)
        assert example.mask.sum() >= (np.isin(example.tokens, template.stops) & (example.mask == 1)).sum() >= 1
    for shorter, longer in pairwise(examples):
        n = len(shorter.tokens)
        assert longer.tokens[:n].tolist() == shorter.tokens.tolist()
        assert longer.mask[:n].tolist() == shorter.mask.tolist()


@settings(max_examples=examples(40), deadline=None)
@given(contents=st.lists(st.text("ab 1\n\t=é<|>", max_size=12), min_size=4, max_size=4))
def test_the_loss_is_on_what_the_assistant_says_and_on_nothing_else(chats, contents):
    ours, _ = chats["chatml"]
    (example,) = make_template("chatml", ours).examples(asked(turns(*contents)))
    edges = np.flatnonzero(np.diff(example.mask, prepend=0, append=0))
    said = [ours.decode(example.tokens[a:b], special=True) for a, b in zip(edges[::2], edges[1::2])]
    assert said == [c + "<|im_end|>" for c in contents[1::2]]
    whole = "".join(
        f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in zip(["user", "assistant"] * 2, contents)
    ).removesuffix("\n")
    assert ours.decode(example.tokens, special=True) == whole


def test_an_answer_that_would_merge_into_the_prompt_is_tokenised_alone(chats):
    ours, other = chats["chatml"]
    assert ours.encode("\n\n") != ours.encode("\n") * 2  # the generation prompt ends in a line break
    template = make_template("chatml", ours)
    talk = turns("one", "\ntwo")
    (example,), (prompt,) = template.examples(asked(talk)), template.prompts(asked(talk))
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert example.tokens.tolist() != theirs(other, talk)[0][: len(example.tokens)]
    assert ours.decode(example.tokens, special=True) == other.decode(theirs(other, talk)[0]).removesuffix("\n")


# ---- the template stays with the tokenizer ----


def test_a_saved_tokenizer_brings_template_and_ends(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, 300)
    template = make_template("chatml", tokenizer)
    assert 3 in tokenizer.stop_ids and tokenizer.eos_id == 1 and template.stops[0] == 3
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.chat_template == CHATML and again.stop_ids == tokenizer.stop_ids
    assert make_template("model", again).prompts(asked(TALKS[0])) == template.prompts(asked(TALKS[0]))
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert other.chat_template == CHATML
    (example,) = template.examples(asked(TALKS[1]))
    assert theirs(other, TALKS[1])[0][:-1] == example.tokens.tolist()
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [1, 3]


def test_a_file_is_a_template(tmp_path, chats):
    ours, _ = chats["qwen2.5"]
    (tmp_path / "mine.jinja").write_text(QWEN25)
    mine, models = make_template(str(tmp_path / "mine.jinja"), ours), make_template("model", ours)
    assert mine.prompts(asked(*TALKS)) == models.prompts(asked(*TALKS)) and mine.name.endswith("mine.jinja")


def test_of_end_tokens_that_begin_alike_it_is_the_longest(tmp_path):
    core = tokenizers.Tokenizer.from_str(Tokenizer.train(TEXTS, 300)._core.to_str())
    core.add_special_tokens(["<|im_end|", "<|im_end|>>"])
    core.save(str(tmp_path / "tokenizer.json"))
    source = CHATML.replace("<|im_end|>", "<|im_end|>>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": source}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.token(make_template("model", tokenizer).stops[0]) == "<|im_end|>>"


def test_an_end_that_the_tokenizer_has_no_token_for_ends_nothing(tmp_path):
    """As in directories whose generation_config.json was written for a larger vocabulary."""
    Tokenizer.train(TEXTS, 300).save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 9999]}')
    template = make_template("chatml", Tokenizer.load(tmp_path))
    assert template.stops == (3, 1, 9999)
    (example,) = template.examples(asked(TALKS[0]))
    assert example.mask.sum() == len(template.tokenizer.encode("46")) + 1


def test_the_end_of_a_turn_comes_before_the_tokenizers_own_end(chats):
    ours, _ = chats["llama3"]
    stops = make_template("model", ours).stops
    assert [ours.token(i) for i in stops] == ["<|eot_id|>", "<|end_of_text|>"]


@pytest.mark.parametrize(
    ("tail", "eos", "end"),
    [
        ("<|im_end|>\\n", "<eos>", "<|im_end|>"),
        ("<|im_end|><eos>", "<eos>", "<eos>"),  # both are the policy's, and the text ends with the second
        ("<|im_end|><eos>", "<pad>", "<|im_end|>"),
        ("<|im_end|>\\n<eos>", "<eos>", "<|im_end|>"),  # what stands between them is not the policy's
        (" .<|im_start|>\\n", "<eos>", "<|im_start|>"),
    ],
)
def test_the_token_that_ends_a_turn(tmp_path, tail, eos, end):
    source = "{% for m in messages %}{{ m.role + ':' + m.content + '" + tail + "' }}{% endfor %}"
    tokenizer = Tokenizer.train(TEXTS, 300)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos, "chat_template": source + "{% if add_generation_prompt %}assistant:{% endif %}"})
    )
    template = make_template("model", Tokenizer.load(tmp_path))
    assert tokenizer.token(template.stops[0]) == end
    (example,) = template.examples(asked(TALKS[1]))
    said = tokenizer.decode(example.tokens[example.mask == 1], special=True)
    upto = tail.replace("\\n", "\n").partition(end)[0] + end
    assert said == "".join(turn["content"] + upto for turn in TALKS[1][1::2])


# ---- what can be wrong ----


def failure(key, do, kind=TemplateError):
    with raises(kind, key) as caught:
        do()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(folder, source):
    (folder / "t.jinja").write_text(source)
    return str(folder / "t.jinja")


THOUGHT = turns("one", "<think>\nhm\n</think>\n\ntwo", "three", "<think>\nso\n</think>\n\nfour")


def test_a_template_that_drops_earlier_thinking_is_not_prefix_stable(tmp_path, chats):
    ours, _ = chats["chatml"]
    template = make_template(written(tmp_path, QWEN3), ours)
    template.examples(asked(THOUGHT[:2]))
    said = failure("prompt 1.prefix", lambda: template.examples(asked(TALKS[0], THOUGHT)))
    assert said.startswith(f"template {tmp_path}/t.jinja") and "after turn 1 of the assistant" in said
    shown = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert repr("<think>\nhm\n</think>\n\ntwo") in said and f"at character {len(shown)}" in said
    assert repr("two<|im_end|>\n<|im_start") in said


def test_history_that_is_rewritten_is_no_harm_in_a_prompt(tmp_path, chats):
    ours, other = chats["chatml"]
    (ids,) = make_template(written(tmp_path, QWEN3), ours).prompts(asked(THOUGHT))
    expected = theirs(other, THOUGHT[:-1], add_generation_prompt=True, chat_template=QWEN3)[0]
    assert ids == expected and "hm" not in ours.decode(ids)


def test_a_generation_prompt_that_the_answer_does_not_begin_with(tmp_path, chats):
    source = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    assert source != CHATML
    template = make_template(written(tmp_path, source), chats["chatml"][0])
    said = failure("prompt 0.prefix", lambda: template.examples(asked(TALKS[0])))
    assert "before turn 1 of the assistant" in said and "'<think>\\n' at character" in said


def test_an_end_token_in_an_answer(chats):
    template = make_template("chatml", chats["chatml"][0])
    failure(
        "prompt 1.answer", lambda: template.examples(asked(TALKS[0], turns("one", "two<|im_end|>three"))), DataError
    )
    template.prompts(asked(turns("say <|im_end|>", "no")))


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("{% for", "template.syntax"),
        ("{{ messages[0].content }}", "template.answer"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "template.special"),
        ("{{ raise_exception('never') }}", "template.render"),
        ("{{ messages[0].content + none }}", "template.render"),
        ("{{ messages.__class__.__mro__ }}", "template.render"),
        ("{{ messages.append(1) }}", "template.render"),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path, chats, source, key):
    path = written(tmp_path, source)
    failure(key, lambda: make_template(path, chats["chatml"][0]))


def test_a_template_that_fails_on_some_conversation(chats):
    template = make_template("model", chats["llama2"][0])
    said = failure("template.render", lambda: template.prompts(asked(turns("one", "two", system="three"))))
    assert said.endswith("of roles system, user: only user and assistant")


def test_a_turn_without_an_end_token(tmp_path, chats):
    source = "{% for m in messages %}{{ m.content }}{% if 'x' not in m.content %}<|im_end|>{% endif %}\n{% endfor %}"
    template = make_template(written(tmp_path, source), chats["chatml"][0])
    assert "['<|im_end|>'" in failure("template.end", lambda: template.examples(asked(turns("one", "x"))))


def test_an_end_token_that_texts_do_not_hold(tmp_path):
    """</s> is in the vocabulary, but no text is searched for it: a turn would never be seen to end."""
    source = "{% for m in messages %}{{ m.content + eos_token }}<|im_end|>{% endfor %}"
    vocabulary = {"one": 0, "two": 1, "</s>": 2, "<|im_end|>": 3}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="one"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<|im_end|>"])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": source}))
    template = make_template("model", Tokenizer.load(tmp_path))
    said = failure("prompt 0.end", lambda: template.examples(asked(turns("one", "two"))))
    assert "by token 0" in said and "(3, 2)" in said


def test_names_that_mean_nothing(tmp_path):
    characters = Tokenizer.characters("abc")
    failure("tokenizer.chat_template", lambda: make_template("model", characters))
    assert "bpe:SIZE" in failure("template.special", lambda: make_template("chatml", characters))
    failure("data.template", lambda: make_template("chatlm", characters))
    (tmp_path / "b.jinja").write_bytes(b"\xff\xfe")
    failure("data.template", lambda: make_template(str(tmp_path / "b.jinja"), characters))


# -- conversations without a template ----------------------------------------------------------------------------------

ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "talk", [(SAY | {"role": "system"}, ASK, SAY), (ASK, SAY, ASK), (ASK, SAY, ASK, SAY), (ASK, ASK)]
)
def test_several_turns_are_no_plain_text(talk):
    plain = make_template("", Tokenizer.characters("2+?4"))
    prompt = Prompt(3, "2+2?", "4", {}, talk, "d.jsonl:4")
    for make in (plain.prompts, plain.examples):
        with raises(DataError, "d.jsonl:4.template"):
            make([prompt])


@pytest.mark.parametrize("talk", [(ASK,), (ASK, SAY)])
def test_one_turn_of_each_is_a_prompt_and_its_answer(talk):
    plain = make_template("", Tokenizer.characters("2+?4"))
    bare, told = Prompt(0, "2+2?", "4"), Prompt(0, "2+2?", "4", {}, talk)
    assert plain.prompts([told]) == plain.prompts([bare])
    assert plain.examples([told])[0].tokens.tolist() == plain.examples([bare])[0].tokens.tolist()


def test_a_transcript_needs_the_tokenizer_whose_tokens_it_names(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    with raises(TemplateError, "data.tokenizer"):
        transcript(str(path), "bpe:300")
    Tokenizer.characters("2+?4").save(tmp_path)
    for prompt in (Prompt(0, "2+2?", "4", {}, (ASK, SAY)), Prompt(0, "2+2?", "4", {}, (ASK,))):
        assert transcript(str(path), str(tmp_path))(prompt) == "2+2?<eos>4<eos>"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_chatml_lists_tools_in_the_system_message(system):
    tokenizer = Tokenizer.train(TEXTS, 400)
    template = make_template("chatml", tokenizer)
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {}}}]
    asked = turns("What is 12 + 34?", "", system=system)[:-1]
    plain, listed = (tokenizer.decode(template.begin(asked, t), special=True) for t in ((), tools))
    own = f"<|im_start|>system\n{system}\n\n" if system else "<|im_start|>system\n"
    assert listed.startswith(f"{own}You may call these tools:") and json.dumps(tools[0]) in listed
    user = plain[plain.index("<|im_start|>user") :]
    assert listed.endswith(f"</tool_call><|im_end|>\n{user}") and listed.count("<|im_start|>system") == 1
    answer = [{"role": "tool", "content": "46"}]
    assert template.follow(answer, tools) == template.follow(answer)


# ---- tools ----

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MANY = [*turns("one"), {"role": "assistant", "content": "two", "tool_calls": [
    {"id": "tilth0000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é\n"}}},
    {"id": "tilth0001", "type": "function", "function": {"name": "add", "arguments": {}}},
]}, {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, *turns("", "five")[1:]]  # fmt: skip


def test_calls_and_tools_equal_those_of_transformers(chats):
    ours, other = chats["chatml"]
    prompt = Prompt(0, "", "five", {}, tuple(MANY), tools=(ADD,))
    (example,) = make_template("chatml", ours).examples([prompt])
    ids, mask = theirs(other, MANY, tools=[ADD], return_assistant_tokens_mask=True)
    n = len(example.tokens)
    assert (example.tokens.tolist(), example.mask.tolist()) == (ids[:n], mask[:n])
    calls = parse_calls(ours.decode(example.tokens[example.mask == 1], special=True).partition("<|im_end|>")[0])
    assert calls == ("two", [ToolCall("add", {"a": 1, "b": "é\n"}), ToolCall("add")])
    (asked,) = make_template("chatml", ours, [ADD]).prompts([Prompt(0, "", None, {}, tuple(MANY[:-1]))])
    assert asked == theirs(other, MANY[:-1], tools=[ADD], add_generation_prompt=True)[0] == ids[: len(asked)]


def test_tools_of_a_record_come_before_those_of_the_run(chats):
    own = {"type": "function", "function": {"name": "own"}}
    template = make_template("chatml", chats["chatml"][0], [ADD])
    (mine,), (others,) = (template.prompts([Prompt(0, "one", tools=tools)]) for tools in ((own,), ()))
    assert [("own" in text, "add" in text) for text in map(template.tokenizer.decode, (mine, others))] == [
        (True, False), (False, True)]  # fmt: skip


def test_a_template_that_leaves_out_calls_or_tools(chats):
    template = make_template("model", chats["qwen2.5"][0])
    failure("template.tool_calls", lambda: template.examples([Prompt(0, "", "five", {}, tuple(MANY))]))
    failure("template.tools", lambda: template.prompts([Prompt(0, "one", tools=(ADD,))]))
    plain = make_template("", chats["chatml"][0])
    for prompt in (Prompt(0, "", "", {}, tuple(MANY[:2])), Prompt(0, "one", tools=(ADD,))):
        failure("prompt 0.template", lambda asked=prompt: plain.prompts([asked]), DataError)
