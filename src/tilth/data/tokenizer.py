"""Convert text to token ids and back with the ``tokenizers`` library; directories are those of Hugging Face."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tilth.core.errors import DataError

PAD, EOS, TURN, TURN_END = "<pad>", "<eos>", "<|im_start|>", "<|im_end|>"

_BYTES = pre_tokenizers.ByteLevel.alphabet()
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Word pattern of Qwen2, in which each digit is a word; tokens do not merge across words."""
_PART = 1 << 20
"""Characters that a tokenizer is trained on at once: ``tokenizers`` needs about 200 bytes for each."""
_GROWTH = 100
"""Most characters that replacements one after another may make of one: three of a thousand each make a gigabyte."""
_MOST_ID = 2**24
"""Greatest id of a token: ``tokenizers`` lists all ids without a token, 16 GB for those of 32 bits."""
_NO_TOKEN = 2**32 - 1
"""An id without a token."""

CHAT_TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
_KEPT = ("tokenizer_config.json", "special_tokens_map.json", GENERATION, CHAT_TEMPLATE)
_BESIDE = (*_KEPT, "config.json")
_USUAL_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", EOS)

NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no text, or not yet."""


class Tokenizer:
    """A tokenizer with its end and padding tokens.

    ``stop_ids``: all tokens that end a completion (instruction-tuned models have several), ``eos_id`` first.
    ``special_tokens``: texts by their names in chat templates, such as bos_token. ``appended``: tokens that the
    library would append to a text, such as an end token; ``encode`` leaves them out. Padding and truncation in the
    file of ``core`` have no effect here: transformers sets the two for each call as well. ``most``: texts that are
    certain to have more tokens are refused before they are encoded; 0: none are.
    """

    most = 0

    def __init__(self, core: tokenizers.Tokenizer, eos: str, pad: str, files: dict[str, str] | None = None) -> None:
        self._core = core
        self._padding, self._truncation = core.padding, core.truncation
        core.no_padding()
        core.no_truncation()
        self.appended = _appended(core)
        self._files = files if files is not None else _config_files(eos, pad)
        self.special_tokens = {**_named(self._files), "eos_token": eos, "pad_token": pad}
        self.eos_id = self._id(eos)
        self.pad_id = self._id(pad)
        self.stop_ids: tuple[int, ...] = (self.eos_id,)

    @classmethod
    def characters(cls, alphabet: Iterable[str]) -> "Tokenizer":
        """Build a tokenizer of one token per character: padding 0, end 1, then the alphabet in sorted order."""
        letters = sorted(set(alphabet))
        vocabulary = {token: i for i, token in enumerate([PAD, EOS, *letters])}
        core = tokenizers.Tokenizer(models.WordLevel(vocabulary))
        core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
        core.add_special_tokens([PAD, EOS])
        return cls(core, EOS, PAD)

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "Tokenizer":
        """Train byte-level BPE of at most ``size`` tokens (Sennrich et al. 2016; bytes of GPT-2), deterministically.

        Every text can be encoded and is decoded to itself. Token 0 is padding, 1 the end, 2 and 3 begin and end a
        turn. A merge occurs at least twice, so a small corpus gives fewer tokens. Raises ``DataError``.
        """
        special = [PAD, EOS, TURN, TURN_END]
        least = len(_BYTES) + len(special)
        if size < least:
            message = f"a tokenizer of {size} tokens is too small: 256 bytes and {len(special)} special tokens take"
            raise DataError(f"{message} {least}", key="size")
        core = tokenizers.Tokenizer(models.BPE())
        words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            special_tokens=special,
            initial_alphabet=sorted(_BYTES),
            show_progress=False,
        )
        core.train_from_iterator(_not_empty(texts), trainer)
        return cls(core, EOS, PAD)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a directory with ``tokenizer.json``, or that file. Raises ``DataError``."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            message = f"no tokenizer at {str(path)!r}; give a tokenizer.json or its directory, characters, or bpe:SIZE"
            raise DataError(message, key="tokenizer.json.missing")
        core = _parse(file)
        files = {name: _text(file.parent / name) for name in _BESIDE if (file.parent / name).is_file()}
        config = {name: _json(file.parent / name, text) for name, text in files.items() if name.endswith(".json")}
        eos = _end(core, config, file)
        pad = _special(config, "pad_token")
        tokenizer = cls(core, eos, pad if core.token_to_id(pad) is not None else eos, _kept(files, eos))
        ends = [tokenizer.eos_id, *_ids(config.get("generation_config.json", {}).get("eos_token_id"))]
        tokenizer.stop_ids = tuple(dict.fromkeys(ends))
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Greatest token id plus one; a model's embedding may be larger, never smaller."""
        return max(self.vocabulary().values()) + 1

    @property
    def chat_template(self) -> str:
        """Jinja source of the loaded template, or of the one set by ``converse``; "" if there is none."""
        if CHAT_TEMPLATE in self._files:
            return self._files[CHAT_TEMPLATE]
        found = json.loads(self._files.get("tokenizer_config.json", "{}")).get("chat_template") or ""
        if isinstance(found, list):  # several by name, as in [{"name": "default", "template": ...}]
            try:
                found = {t["name"]: t["template"] for t in found}.get("default", "")
            except (TypeError, KeyError):
                message = "chat_template of tokenizer_config.json is a list, but not of names and templates"
                raise DataError(message, key="tokenizer_config.json.chat_template") from None
        return str(found)

    def converse(self, template: str, ends: Sequence[int]) -> None:
        """Set the chat template and add tokens that end a completion, also for ``save``."""
        if template != self.chat_template:
            self._files[CHAT_TEMPLATE] = template
        self.stop_ids = tuple(dict.fromkeys([*self.stop_ids, *ends]))
        if len(self.stop_ids) > 1:
            before = json.loads(self._files.get(GENERATION, "{}"))
            self._files[GENERATION] = json.dumps({**before, "eos_token_id": list(self.stop_ids)}, indent=2) + "\n"

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their text."""
        return dict(self._core.get_vocab(with_added_tokens=True))

    def special(self) -> dict[str, int]:
        """Return the ids of the special tokens by their text; they are matched before all others."""
        return {token.content: i for i, token in self._core.get_added_tokens_decoder().items() if token.special}

    def plain(self, text: str) -> str:
        """Return a text without special tokens: a space is put into each, so that it is text like any other."""
        for token in self.special():
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def token(self, id: int) -> str:
        """Return the token of an id as the vocabulary writes it; "" if there is none."""
        return self._core.id_to_token(id) or ""

    def to_json(self) -> str:
        """Return the whole tokenizer as the library tokenizers writes it."""
        return str(self._core.to_str())

    def fingerprint(self) -> str:
        """Digest that differs for a tokenizer with other ids or stops."""
        return hashlib.blake2b(f"{self._core.to_str()} {self.stop_ids}".encode(), digest_size=8).hexdigest()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids. special: prepend the tokenizer's own first tokens, such as a begin token.

        Tokens that it would append are left out: a prompt continues, and a caller that ends a text adds ``eos_id``.
        """
        return self.encode_all([text], special)[0]

    def encode_all(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Return token ids of each text; ``DataError`` names a text that has characters without a token."""
        if self.most and self._widest and max(map(len, texts), default=0) > self.most * self._widest:
            message = f"a text of {max(map(len, texts))} characters has more than {self.most} tokens in any case"
            raise DataError(message, key="tokenizer.most")
        with _of_library(lambda error: self._unknown(texts, error)):
            rows = [e.ids for e in self._core.encode_batch_fast(list(texts), add_special_tokens=special)]
        behind = len(self.appended) if special else 0
        return [ids[: len(ids) - behind] for ids in rows] if behind else rows

    @cached_property
    def _widest(self) -> int:
        """Most characters of a text that one token may stand for; 0 if that is not known: what normalises, splits or
        strips a text may leave any number of them out."""
        found = json.loads(self.to_json())
        kinds = [found["pre_tokenizer"], *(found["pre_tokenizer"] or {}).get("pretokenizers", [])]
        bytewise = any(one and one["type"] == "ByteLevel" for one in kinds)
        whole = not any(one and one.get("behavior") == "Removed" for one in kinds)
        strips = any(token["lstrip"] or token["rstrip"] for token in found["added_tokens"])
        composes = (found["normalizer"] or {}).get("type", "NFC") == "NFC"  # of up to 4 characters one
        vocabulary = self.vocabulary()
        bytewise &= found["model"]["type"] == "BPE" and set(_BYTES) <= vocabulary.keys()
        return 4 * max(map(len, vocabulary)) if bytewise and whole and composes and not strips else 0

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of token ids. special: include special tokens, such as the end token."""
        with _of_library(lambda error: DataError(f"the tokenizer cannot decode: {error}", key="tokenizer.decoder")):
            return self._core.decode([int(i) for i in ids], skip_special_tokens=not special)

    def save(self, directory: str | Path) -> None:
        """Write ``tokenizer.json`` and the files beside it, so that ``transformers.AutoTokenizer`` loads them.

        Padding and truncation are written as they were loaded: transformers takes their sides from there.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        core = tokenizers.Tokenizer.from_str(self._core.to_str())
        if self._padding is not None:
            core.enable_padding(**self._padding)
        if self._truncation is not None:
            core.enable_truncation(**self._truncation)
        core.save(str(folder / "tokenizer.json"))
        for name, text in self._files.items():
            (folder / name).write_text(text, "utf-8")

    def _id(self, token: str) -> int:
        found = self._core.token_to_id(token)
        if found is None:
            message = f"tokenizer has no token {token!r}, which its configuration names as end or padding"
            raise DataError(message, key=f"tokenizer.{token}")
        return int(found)

    def _unknown(self, texts: Sequence[str], error: BaseException) -> DataError:
        vocabulary = self.vocabulary()
        for text in texts:
            missing = sorted(set(text) - vocabulary.keys())
            if missing:
                message = f"the tokenizer has no token for {missing[0]!r} in {text[:60]!r}"
                return DataError(message, key=f"tokenizer.{missing[0]}")
        return DataError(f"the tokenizer failed: {error}", key="tokenizer")


def check_vocabulary(tokenizer: Tokenizer, size: int, own: Tokenizer | None = None, model: str = "the model") -> None:
    """Raise ``DataError`` unless a model with ``size`` embedding rows can learn from a tokenizer's ids.

    own: the model's tokenizer; a token in both must have one id, and further tokens do no harm. model: its name.
    """
    if tokenizer.vocab_size > size:
        mine = tokenizer is own
        hint = "config.json and tokenizer.json do not belong together" if mine else "take the model's own"
        whose = "its own tokenizer" if mine else "the tokenizer"
        message = f"{model} has embeddings of {size} tokens, {whose} {tokenizer.vocab_size} tokens; {hint}"
        raise DataError(message, key="config.json.vocab_size" if mine else "data.tokenizer.size")
    if own is None:
        return
    theirs = own.vocabulary()
    names = {i: token for token, i in theirs.items()}
    for token, id in sorted(tokenizer.vocabulary().items(), key=lambda item: item[1]):
        if names.get(id, token) != token:
            differ = f"token {id} is {token!r} in the one and {names[id]!r} in the other"
        elif theirs.get(token, id) != id:
            differ = f"{token!r} is token {id} in the one and {theirs[token]} in the other"
        else:
            continue
        raise DataError(
            f"data.tokenizer and the model's own tokenizer differ: {differ}; leave data.tokenizer empty to take "
            f"the model's own",
            key=f"data.tokenizer.{token}",
        )


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, long ones in parts; raise ``DataError`` at the end if all were blank."""
    found = False
    for text in texts:
        found = found or bool(text.strip())
        yield from (text[at : at + _PART] for at in range(0, len(text), _PART))
    if not found:
        raise DataError("there is no text to train a tokenizer on", key="texts")


def _named(files: dict[str, str]) -> dict[str, str]:
    """Special tokens by key, from the files of a tokenizer."""
    config = {name: json.loads(files.get(name, "{}")) for name in ("tokenizer_config.json", "special_tokens_map.json")}
    keys = sorted({k for found in config.values() for k in found if k.endswith("_token")})
    return {key: token for key in keys if (token := _special(config, key))}


def _parse(file: Path) -> tokenizers.Tokenizer:
    text, wrong = _text(file), f"{file} is not a tokenizer"
    with _of_library(lambda error: DataError(f"{wrong}: {error}", key=file.name)):
        found = json.loads(text)
    _check_model(file, found.get("model") if isinstance(found, dict) else None)
    with _of_library(lambda error: DataError(f"{wrong}: {error}", key=file.name)):
        core = tokenizers.Tokenizer.from_str(text)
    for name, part in (("normalizer", core.normalizer), ("decoder", core.decoder)):
        if part is not None and (most := _growth(json.loads(part.__getstate__()))) > _GROWTH:
            message = f"{file}: replacements of {name} make {most} characters of one; at most {_GROWTH} may be"
            raise DataError(message, key=f"{file.name}.{name}")
    if dropout := getattr(core.model, "dropout", None):
        message = f"{file} has model.dropout={dropout:.6g}: a text would have other tokens each time; set it to null"
        raise DataError(message, key=f"{file.name}.model.dropout")
    return core


def _check_model(file: Path, model: Any) -> None:
    """Raise ``DataError`` for a model with which ``tokenizers`` takes memory by ids, or aborts the process."""
    model = model if isinstance(model, dict) else {}
    vocabulary, prefix = model.get("vocab"), model.get("continuing_subword_prefix")
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    greatest = max((id for id in ids if isinstance(id, int)), default=0)
    if greatest > _MOST_ID:
        message = f"{file} has a token with the id {greatest}; at most {_MOST_ID} may be: count ids from 0"
        raise DataError(message, key=f"{file.name}.model.vocab")
    if not isinstance(prefix, str) or not isinstance(model.get("merges"), list):
        return
    for merge in model["merges"]:  # the library cuts the prefix off unseen
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(pair, list) and pair and isinstance(pair[-1], str) and not pair[-1].startswith(prefix):
            message = f"{file}: the merge {merge!r} has a second part without continuing_subword_prefix={prefix!r}"
            raise DataError(message, key=f"{file.name}.model.merges")


@contextmanager
def _of_library(told: Callable[[BaseException], DataError]) -> Iterator[None]:
    """Raise what ``told`` makes of an error of ``tokenizers``: a bare Exception, or a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise told(error) from None
        raise


def _growth(part: Any) -> int:
    """Return the characters that a normalizer or decoder, as plain data, makes of one by its replacements."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    inner = math.prod(map(_growth, part.values()))
    return inner * max(1, len(part["content"])) if part.get("type") == "Replace" else inner


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}", key=f"{file.name}.utf8") from None


def _appended(core: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Tokens that a tokenizer appends, found by post-processing one token that no tokenizer has."""
    probe = tokenizers.Encoding()
    probe.pad(1, pad_id=_NO_TOKEN)
    wrong = "the post-processor of the tokenizer fails at a text of one token"
    with _of_library(lambda error: DataError(f"{wrong}: {error}", key="tokenizer.post_processor")):
        ids = core.post_process(probe).ids
    if _NO_TOKEN not in ids:
        message = "the post-processor of the tokenizer leaves the text out; it must have the sequence A"
        raise DataError(message, key="tokenizer.post_processor")
    return tuple(ids[len(ids) - ids[::-1].index(_NO_TOKEN) :])


def _json(file: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}", key=f"{file.name}.json") from None
    if not isinstance(data, dict):
        raise DataError(f"{file} holds a {type(data).__name__}, not an object", key=f"{file.name}.type")
    return data


def _special(config: dict[str, dict[str, Any]], name: str) -> str:
    """Text of a special token, which is a string or an object with ``content``; "" if there is none."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = config.get(file, {}).get(name)
        if isinstance(token, (str, dict)) and token:
            return str(token["content"] if isinstance(token, dict) else token)
    return ""


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _end(core: tokenizers.Tokenizer, config: dict[str, dict[str, Any]], file: Path) -> str:
    named = [_special(config, "eos_token")]
    for name in ("generation_config.json", "config.json"):
        named += [core.id_to_token(i) or "" for i in _ids(config.get(name, {}).get("eos_token_id"))]
    for token in [*filter(None, named), *_USUAL_ENDS]:
        if core.token_to_id(token) is not None:
            return token
    message = f"{file} does not name the token that ends a text; name eos_token in tokenizer_config.json beside it"
    raise DataError(message, key="tokenizer_config.json.eos_token")


def _kept(files: dict[str, str], eos: str) -> dict[str, str]:
    """Files for ``save``: everything about reading and ending a text, nothing about the model."""
    kept = {name: text for name, text in files.items() if name in _KEPT}
    return kept if "tokenizer_config.json" in kept else {**_config_files(eos, eos), **kept}


def _config_files(eos: str, pad: str) -> dict[str, str]:
    special = {"eos_token": eos, "pad_token": pad}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    return {
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }
