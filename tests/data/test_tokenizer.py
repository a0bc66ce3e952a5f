"""The tokenizer agrees with transformers on what it saves and loads, and says what is wrong with what it cannot."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.data.tokenizer import Tokenizer, check_vocabulary

TEXT = Path(__file__).read_text() + "Größe, déjà vu, 中文, 𝄞 and 12345 + 67 = 12412 <|im_start|> \t\n"
SUMS = "0123456789+="


def test_characters_have_stable_ids():
    tokenizer = Tokenizer.characters("cab")
    assert tokenizer.encode("abc") == [2, 3, 4] and Tokenizer.characters("abcabc").encode("abc") == [2, 3, 4]
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (0, 1, (1,), 5)


@given(st.text("01+=ä \n\té€𝄞\\[]^-", max_size=20))
def test_characters_round_trip(text):
    tokenizer = Tokenizer.characters("01+=ä \n\té€𝄞\\[]^-")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text


def test_decode_leaves_special_tokens_out_unless_asked():
    tokenizer = Tokenizer.characters(SUMS)
    ids = [*tokenizer.encode("1+2="), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "1+2=" and tokenizer.decode(ids, special=True) == "1+2=<eos>"


def test_encode_all_is_encode_of_each():
    tokenizer = Tokenizer.characters(SUMS)
    texts = ["1", "", "12+34="]
    assert tokenizer.encode_all(texts) == [tokenizer.encode(t) for t in texts]


def test_unknown_character_is_named():
    with raises(DataError, "tokenizer.x"):
        Tokenizer.characters(SUMS).encode("1x2")


@pytest.mark.parametrize("texts", [["123+456=", "0579", "0 1", ""]])
def test_saved_directory_loads_in_transformers_with_equal_ids(tmp_path, texts):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.characters(SUMS + " ")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, tokenizer.vocab_size)


def test_saved_directory_loads_again(tmp_path):
    first = Tokenizer.characters(SUMS)
    first.save(tmp_path / "a")
    second = Tokenizer.load(tmp_path / "a")
    assert second.encode("9+9=") == first.encode("9+9=") and (second.eos_id, second.pad_id) == (1, 0)
    second.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


# -- directories of real models --------------------------------------------------------------------------------------


def write_model_tokenizer(folder, **files):
    """A tokenizer such as Llama's: words, and a begin token put before every text."""
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", "<|im_end|>", "one", "two", "+"])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="one"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    core.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_begin_token_with_special_only(tmp_path):
    tokenizer = Tokenizer.load(write_model_tokenizer(tmp_path, tokenizer_config={"eos_token": "</s>"}))
    assert tokenizer.encode("one two") == [0, 3, 4] and tokenizer.encode("one two", special=False) == [3, 4]


def test_ids_equal_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = write_model_tokenizer(tmp_path, tokenizer_config=config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("two + one")["input_ids"] == Tokenizer.load(folder).encode("two + one") == [0, 4, 5, 3]


def test_file_and_directory_are_the_same(tmp_path):
    folder = write_model_tokenizer(tmp_path, tokenizer_config={"eos_token": "</s>"})
    assert Tokenizer.load(folder / "tokenizer.json").eos_id == Tokenizer.load(str(folder)).eos_id == 1


@pytest.mark.parametrize(
    ("files", "eos", "stops"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, 1, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, 1, (1,)),
        ({"special_tokens_map": {"eos_token": "</s>"}}, 1, (1,)),
        ({"generation_config": {"eos_token_id": [2, 1]}}, 2, (2, 1)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [2, 1]}}, 1, (1, 2)),
        ({"config": {"eos_token_id": 1}}, 1, (1,)),
        ({}, 2, (2,)),
    ],
)
def test_where_the_end_token_comes_from(tmp_path, files, eos, stops):
    tokenizer = Tokenizer.load(write_model_tokenizer(tmp_path, **files))
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (eos, stops)


def test_padding_is_the_end_token_if_there_is_none(tmp_path):
    config = {"eos_token": "</s>", "pad_token": "<s>"}
    assert Tokenizer.load(write_model_tokenizer(tmp_path / "a", tokenizer_config=config)).pad_id == 0
    del config["pad_token"]
    assert Tokenizer.load(write_model_tokenizer(tmp_path / "b", tokenizer_config=config)).pad_id == 1


def test_chat_template_is_kept_and_the_model_files_are_not(tmp_path):
    folder = write_model_tokenizer(tmp_path / "a", config={"eos_token_id": 1})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    Tokenizer.load(folder).save(tmp_path / "b")
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "b" / "config.json").exists()
    assert Tokenizer.load(tmp_path / "b").eos_id == 1


def test_all_ends_of_a_text_are_kept(tmp_path):
    Tokenizer.load(write_model_tokenizer(tmp_path / "a", generation_config={"eos_token_id": [2, 1]})).save(
        tmp_path / "b"
    )
    assert Tokenizer.load(tmp_path / "b").stop_ids == (2, 1)


def test_vocab_size_covers_the_greatest_id(tmp_path):
    core = tokenizers.Tokenizer(models.WordLevel({"</s>": 7, "a": 3}))
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).vocab_size == 8


# -- trained on a text -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    return Tokenizer.train([TEXT, "", TEXT[:500]], 500)


def test_a_trained_tokenizer_has_the_size_that_was_asked_for(trained):
    assert trained.vocab_size == 500 == len(trained.vocabulary())
    assert [trained.token(i) for i in range(4)] == ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    assert (trained.pad_id, trained.eos_id, trained.stop_ids, trained.chat_template) == (0, 1, (1,), "")
    assert len(trained.encode(TEXT)) < 0.7 * len(TEXT.encode())
    assert Tokenizer.train(["ab" * 9], 500).vocab_size < 300  # nothing more to merge


@given(st.text(max_size=40))
def test_any_text_comes_back(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids, special=True) == text and max(ids, default=0) < trained.vocab_size
    assert ids == trained.encode(text, special=False)  # nothing is put around a text


def test_each_digit_is_a_token_and_special_tokens_are_one(trained):
    assert [trained.decode([i]) for i in trained.encode("12345")] == list("12345")
    assert trained.encode("<|im_start|>user<|im_end|>")[0] == 2 and trained.encode("<|im_end|>") == [3]


def test_training_is_a_function_of_the_texts(trained):
    assert Tokenizer.train(iter([TEXT, "", TEXT[:500]]), 500).fingerprint() == trained.fingerprint()
    assert Tokenizer.train([TEXT + " other other"], 500).fingerprint() != trained.fingerprint()
    script = (
        "from tests.data.test_tokenizer import TEXT\n"
        "from tilth.data.tokenizer import Tokenizer\n"
        "print(Tokenizer.train([TEXT, '', TEXT[:500]], 500).fingerprint())"
    )
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": f"{root}/src:{root}", "TOKENIZERS_PARALLELISM": "false"}
    said = subprocess.run([sys.executable, "-c", script], env=env, cwd=root, capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == trained.fingerprint(), said.stderr


@pytest.mark.parametrize("model_type", ["", "qwen2", "qwen3", "llama"])
def test_a_trained_tokenizer_loads_in_transformers_with_equal_ids(tmp_path, trained, model_type):
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    if model_type:  # a model of this kind lies beside it; its own way of reading text must not take over
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["one two  three\n\n\tfour", " 123+456=579 ", "Ｇ é 𝄞", "<|im_start|>user\nhi<|im_end|>\n", TEXT]
    if model_type != "qwen2":  # which transformers reads by a class of its own that composes accents first
        texts.append("e\u0301")
    for text in texts:
        assert theirs(text)["input_ids"] == trained.encode(text)
        assert theirs.decode(trained.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)


def test_a_trained_tokenizer_loads_again(tmp_path, trained):
    trained.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint() == trained.fingerprint()


def test_only_a_text_that_is_certain_to_be_too_long_is_refused_unread(trained, monkeypatch):
    widest = max(trained.vocabulary(), key=len)
    monkeypatch.setattr(trained, "most", 8)
    assert len(trained.encode(widest * 8)) <= 8
    with raises(DataError, "tokenizer.most"):
        trained.encode("a" * (4 * 8 * len(widest) + 1))
    words = Tokenizer.characters("ab")
    words.most = 8
    assert len(words.encode("a" * 999)) == 999


def test_fingerprints_tell_ends_apart(trained):
    other = Tokenizer.train([TEXT, "", TEXT[:500]], 500)
    other.converse("{{ messages }}", [3])
    assert other.stop_ids == (1, 3) and other.fingerprint() != trained.fingerprint()


# -- files that were saved after a call with padding or truncation ---------------------------------------------------

BLOCKS = {
    "longest": {"padding": True},
    "fixed": {"padding": "max_length", "truncation": True, "max_length": 8},
    "multiple": {"padding": True, "pad_to_multiple_of": 8},
    "cut": {"truncation": True, "max_length": 3, "stride": 1},
    "both": {"padding": "longest", "truncation": "longest_first", "max_length": 5},
}


def saved_after(folder, trained, side="left", **call):
    """What transformers leaves in a folder of a tokenizer that it last called so, as a training script does."""
    transformers = pytest.importorskip("transformers")
    trained.save(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side, truncation_side=side)
    theirs(["one two three four five six seven", "eight"], **call)
    theirs.save_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    assert bool(state["padding"]) == ("padding" in call) and bool(state["truncation"]) == ("truncation" in call)
    return folder


@pytest.fixture(scope="module", params=BLOCKS)
def after_a_call(request, tmp_path_factory, trained):
    return saved_after(tmp_path_factory.mktemp(request.param), trained, **BLOCKS[request.param])


@given(texts=st.lists(st.text(max_size=30), max_size=5))
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_padding_and_truncation_of_the_file_are_those_of_a_call_that_is_over(after_a_call, trained, texts):
    tokenizer = Tokenizer.load(after_a_call)
    found = tokenizer.encode_all(texts)
    assert found == [tokenizer.encode(text) for text in texts] == trained.encode_all(texts)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(after_a_call)
    assert found == [theirs(text)["input_ids"] for text in texts]
    if texts:
        assert found == theirs(texts)["input_ids"]


def test_padding_and_truncation_tell_no_tokenizers_apart(after_a_call, tmp_path):
    shutil.copytree(after_a_call, tmp_path, dirs_exist_ok=True)
    state = json.loads((after_a_call / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**state, "padding": None, "truncation": None}))
    assert Tokenizer.load(after_a_call).fingerprint() == Tokenizer.load(tmp_path).fingerprint()


def test_padding_and_truncation_are_written_back(after_a_call, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = json.loads((after_a_call / "tokenizer_config.json").read_text())
    for key in ("padding_side", "truncation_side"):  # older transformers leave these to the blocks
        config.pop(key)
    (after_a_call / "tokenizer_config.json").write_text(json.dumps(config))
    Tokenizer.load(after_a_call).save(tmp_path)
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (after_a_call, tmp_path))
    assert (after.padding_side, after.truncation_side) == (before.padding_side, before.truncation_side)
    texts = ["one two", "three"]
    assert after(texts, padding=True)["input_ids"] == before(texts, padding=True)["input_ids"]
    state = [json.loads((folder / "tokenizer.json").read_text()) for folder in (after_a_call, tmp_path)]
    assert state[0] == state[1]


def test_merges_that_are_left_out_by_chance(tmp_path, trained):
    trained.save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    check_failure(tmp_path, "tokenizer.json.model.dropout")


# -- tokenizers that end a text ----------------------------------------------------------------------------------------

AROUND = {"<s>": 2, "</s>": 3}
PROCESSORS = {
    "end": (processors.TemplateProcessing("$A </s>", None, [("</s>", 3)]), (3,)),
    "both": (processors.TemplateProcessing("<s> $A </s>", None, list(AROUND.items())), (3,)),
    "two": (processors.TemplateProcessing("<s> $A </s> <s>", None, list(AROUND.items())), (3, 2)),
    "begin": (processors.TemplateProcessing("<s> $A", None, [("<s>", 2)]), ()),
    "bert": (processors.BertProcessing(("</s>", 3), ("<s>", 2)), (3,)),
    "roberta": (processors.RobertaProcessing(("</s>", 3), ("<s>", 2)), (3,)),
    "bytes": (processors.ByteLevel(trim_offsets=False), ()),
    "none": (None, ()),
}


@pytest.fixture(scope="module", params=PROCESSORS)
def around(request, tmp_path_factory, trained):
    """A folder with a tokenizer that puts something around a text, and what it puts behind."""
    processor, behind = PROCESSORS[request.param]
    if request.param == "both":  # as saved with byte-level models, after a call that cut and padded
        processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processor])
    core = tokenizers.Tokenizer.from_str(trained._core.to_str().replace("<|im_start|>", "<s>"))
    core = tokenizers.Tokenizer.from_str(core.to_str().replace("<|im_end|>", "</s>"))
    assert [core.token_to_id(token) for token in AROUND] == list(AROUND.values())
    if processor is not None:
        core.post_processor = processor
    if request.param == "both":
        core.enable_truncation(4)
    folder = tmp_path_factory.mktemp(request.param)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, behind


@given(text=st.text(max_size=20) | st.text("a </s>", max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
def test_a_text_is_not_ended_since_it_goes_on(around, text):
    folder, behind = around
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    ids = theirs(text)["input_ids"]
    assert tokenizer.appended == behind == tuple(ids[len(ids) - len(behind) :])
    assert tokenizer.encode(text) == ids[: len(ids) - len(behind)]
    assert tokenizer.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]


# -- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "beside", "found"),
    [
        (None, None, ""),
        ("inside", None, "inside"),
        (None, "beside", "beside"),
        ("inside", "beside", "beside"),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], None, "yes"),
        ([{"name": "tool_use", "template": "no"}], None, ""),
    ],
)
def test_where_the_chat_template_comes_from(tmp_path, inside, beside, found):
    config = {"eos_token": "</s>"} | ({"chat_template": inside} if inside else {})
    folder = write_model_tokenizer(tmp_path / "a", tokenizer_config=config)
    if beside:
        (folder / "chat_template.jinja").write_text(beside)
    first = Tokenizer.load(folder)
    first.save(tmp_path / "b")
    assert first.chat_template == Tokenizer.load(tmp_path / "b").chat_template == found


def test_names_of_special_tokens(tmp_path):
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "unk_token": None, "add_bos_token": True}
    tokenizer = Tokenizer.load(write_model_tokenizer(tmp_path, tokenizer_config=config))
    assert tokenizer.special_tokens == {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "</s>"}


def test_a_template_that_was_given_takes_the_place_of_the_models(tmp_path):
    config = {"eos_token": "</s>", "chat_template": "old"}
    folder = write_model_tokenizer(tmp_path / "a", tokenizer_config=config, generation_config={"temperature": 0.5})
    tokenizer = Tokenizer.load(folder)
    tokenizer.converse("new", [2])
    tokenizer.save(tmp_path / "b")
    again = Tokenizer.load(tmp_path / "b")
    assert (again.chat_template, again.stop_ids) == ("new", (1, 2))
    settings = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert settings == {"temperature": 0.5, "eos_token_id": [1, 2]}


# -- a tokenizer and a model -----------------------------------------------------------------------------------------


def test_a_tokenizer_of_more_tokens_than_the_model(trained):
    check_vocabulary(trained, 500, trained)
    with raises(DataError, "data.tokenizer.size"):
        check_vocabulary(trained, 499)
    with raises(DataError, "config.json.vocab_size"):
        check_vocabulary(trained, 499, trained, "x")


def test_a_tokenizer_whose_ids_are_not_the_models_own():
    own = Tokenizer.characters("abc")
    check_vocabulary(Tokenizer.characters("abc"), 5, own)
    check_vocabulary(Tokenizer.characters("abcd"), 6, own)  # one more behind the others
    check_vocabulary(Tokenizer.characters("ab"), 5, own)
    with raises(DataError, "data.tokenizer.x"):
        check_vocabulary(Tokenizer.characters("axy"), 5, own)
    with raises(DataError, "data.tokenizer.c"):
        check_vocabulary(Tokenizer.characters("ac"), 5, own)


def test_a_token_that_the_model_knows_by_another_id(tmp_path):
    for name, place in (("a", 7), ("b", 1)):
        (tmp_path / name).mkdir()
        core = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "one": place}))
        core.save(str(tmp_path / name / "tokenizer.json"))
    with raises(DataError, "data.tokenizer.one"):
        check_vocabulary(Tokenizer.load(tmp_path / "a"), 8, Tokenizer.load(tmp_path / "b"))


# -- what can be wrong -----------------------------------------------------------------------------------------------


def check_failure(path, key):
    with raises(DataError, key) as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_missing(tmp_path):
    check_failure(tmp_path / "none", "tokenizer.json.missing")
    check_failure(tmp_path, "tokenizer.json.missing")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Nothing"}}'])
def test_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    check_failure(tmp_path, "tokenizer.json")


def test_broken_configuration(tmp_path):
    folder = write_model_tokenizer(tmp_path)
    for content, field in (
        (b"{", "json"), (b"[]", "type"), (b"[" * 100_000, "json"), (b"9" * 5000, "json"), (b'"\xff"', "utf8")
    ):  # fmt: skip
        (folder / "tokenizer_config.json").write_bytes(content)
        check_failure(folder, f"tokenizer_config.json.{field}")


def test_no_end_token(tmp_path):
    tokenizers.Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    check_failure(tmp_path, "tokenizer_config.json.eos_token")


@pytest.mark.parametrize("texts", [[], [""], iter(["", " \n"])])
def test_no_text_to_train_on(texts):
    with raises(DataError, "texts"):
        Tokenizer.train(texts, 500)


def test_too_small_a_vocabulary():
    assert Tokenizer.train(["abc"], 260).vocab_size == 260
    with raises(DataError, "size"):
        Tokenizer.train(["abc"], 259)


def test_a_chat_template_that_is_none(tmp_path):
    folder = write_model_tokenizer(tmp_path, tokenizer_config={"eos_token": "</s>", "chat_template": [{"name": "x"}]})
    with raises(DataError, "tokenizer_config.json.chat_template"):
        _ = Tokenizer.load(folder).chat_template


def single(*parts):
    """A post-processor of one text."""
    return {"type": "TemplateProcessing", "single": [*parts], "pair": [WHOLE], "special_tokens": {}}


WHOLE = {"Sequence": {"id": "A", "type_id": 0}}
LONG = {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 60}
SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("change, key", [
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "tokenizer.json"),
    ({"normalizer": {"type": "Sequence", "normalizers": [LONG] * 6}}, "tokenizer.json.normalizer"),
    ({"decoder": {"type": "Sequence", "decoders": [LONG] * 6}}, "tokenizer.json.decoder"),
    ({"post_processor": single(WHOLE, {"SpecialToken": {"id": "?", "type_id": 0}})}, "tokenizer.post_processor"),
    ({"post_processor": single({"Sequence": {"id": "B", "type_id": 0}})}, "tokenizer.post_processor"),
    ({"post_processor": single()}, "tokenizer.post_processor"),
    ({"pre_tokenizer": SLOW}, "tokenizer"),
    ({"model": {"type": "BPE", "vocab": {"a": 4294967296}, "merges": []}}, "tokenizer.json.model.vocab"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}, "tokenizer.json"),
])  # fmt: skip
def test_a_crafted_file_is_a_named_error_though_the_library_panics(tmp_path, change, key):
    Tokenizer.train(["hello"], 270).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with raises(DataError, key):
        Tokenizer.load(tmp_path).encode("a" * 40 + "!")


def test_a_normalizer_nested_100_000_deep_is_a_named_error(tmp_path):
    Tokenizer.train(["hello"], 270).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    deep = '{"type":"Sequence","normalizers":[' * 100_000 + "]}" * 100_000
    file.write_text(file.read_text().replace('"normalizer": null', f'"normalizer": {deep}'))
    with raises(DataError, "tokenizer.json"):
        Tokenizer.load(tmp_path)


def bpe(vocabulary, merges, prefix=None):
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, "continuing_subword_prefix": prefix}


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (bpe({"": 0, "a": 1, "b": 2, "ab": 3}, [["a", "b"], ["b", ""]], "##"), "merges"),
        (bpe({"a": 0, "b": 1, "ab": 2}, ["a b"], "é"), "merges"),
        (bpe({"a": 0, "b": 2**32 - 1}, []), "vocab"),
        ({"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}, "vocab"),
    ],
)
def test_a_model_that_would_end_the_process(tmp_path, model, key):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with raises(DataError, f"tokenizer.json.model.{key}"):
        Tokenizer.load(tmp_path)


def test_a_prefix_of_words_goes_on(tmp_path):
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=40, special_tokens=["</s>"], continuing_subword_prefix="##", show_progress=False
    )
    core.train_from_iterator(["abab", "abac"] * 9, trainer)
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("abab") == core.encode("abab").ids
