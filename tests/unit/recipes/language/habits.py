"""Small tokenizers with the habits of published ones, built offline."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MARKS = ("<eos>", "<bos>", "<unk>", "<sep>", "<|user|>", "<|assistant|>", "<|im_end|>")
# Merges are learned from it; no pair of a sign and a digit is frequent.
TEXT = [
    "the answer is four and two and two are four",
    "question: what is two and two? answer: four",
    "Tänze, naïve cafés größer, 数 数 12 345 6789",
    "a  b   c\nanswer:\n four ( ) = + - * /",
] * 8
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _bpe(**options: Any) -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE(unk_token="<unk>", **options))


def _trained(core: Any, trainer: str = "BpeTrainer", **options: Any) -> Any:
    from tokenizers import trainers

    made = getattr(trainers, trainer)(vocab_size=400, special_tokens=list(MARKS), show_progress=False, **options)
    core.train_from_iterator(TEXT, made)
    return core


def _byte_level(*, trims: bool = True, **options: Any) -> Any:
    from tokenizers import decoders, pre_tokenizers, processors

    core = _bpe()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trims)
    return _trained(core, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _split_bytes(pattern: str) -> Any:
    from tokenizers import Regex, decoders, pre_tokenizers

    core = _bpe()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return _trained(core, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _alphabet() -> list[str]:
    return [*(letter for letter in string.printable if letter not in " \t\r\x0b\x0c"), *"▁äßïéö数"]


def _metaspace(scheme: str, *, split: bool, unigram: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core: Any = Tokenizer(models.Unigram()) if unigram else _bpe(fuse_unk=True)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme, split=split)
    if unigram:
        return _trained(core, "UnigramTrainer", unk_token="<unk>", initial_alphabet=_alphabet())
    return _trained(core, initial_alphabet=_alphabet())


def _prepending(*, falls_back: bool) -> Any:
    """As tokenizers of Llama 2 that were converted early: a normalizer writes the blank."""
    from tokenizers import decoders, normalizers

    core = _bpe(fuse_unk=True, byte_fallback=falls_back)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [*_alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))] if falls_back else _alphabet()
    return _trained(core, initial_alphabet=[letter for letter in alphabet if len(letter) == 1])


def _word_piece(**options: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    core: Any = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(**options)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return _trained(core, "WordPieceTrainer", initial_alphabet=_alphabet())


def _chars() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {token: number for number, token in enumerate((*MARKS, *_alphabet(), " "))}
    core: Any = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return core


def _normalized(name: str, *arguments: Any) -> Any:
    from tokenizers import normalizers

    core = _byte_level(add_prefix_space=False)
    core.normalizer = getattr(normalizers, name)(*arguments)
    return core


def _processed(core: Any, single: str) -> Any:
    from tokenizers import processors

    named = [(token, core.token_to_id(token)) for token in single.split() if token in MARKS]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return core


def _added(core: Any, **options: Any) -> Any:
    from tokenizers import AddedToken

    core.add_special_tokens([AddedToken(mark, special=True, **options) for mark in MARKS[4:]])
    return core


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BUILT: dict[str, Callable[[], Any]] = {
    "chars": _chars,
    "chars bos": lambda: _processed(_chars(), "<bos> $A"),
    "chars eos": lambda: _processed(_chars(), "$A <eos>"),
    "chars bos eos": lambda: _processed(_chars(), "<bos> $A <eos>"),
    "chars bos sep": lambda: _processed(_chars(), "<bos> $A <sep>"),
    "bytes": lambda: _byte_level(add_prefix_space=False),
    "bytes trimmed not": lambda: _byte_level(add_prefix_space=False, trims=False),
    "bytes prefix": lambda: _byte_level(add_prefix_space=True),
    "bytes prefix trimmed not": lambda: _byte_level(add_prefix_space=True, trims=False),
    "bytes whole": lambda: _byte_level(add_prefix_space=False, use_regex=False),
    "bytes llama 3": lambda: _split_bytes(LLAMA3),
    "bytes qwen": lambda: _split_bytes(QWEN),
    "bytes eos": lambda: _processed(_byte_level(add_prefix_space=False), "$A <eos>"),
    "bytes prefix eos": lambda: _processed(_byte_level(add_prefix_space=True), "<bos> $A <eos>"),
    "bytes nfc": lambda: _normalized("NFC"),
    "bytes nfkc": lambda: _normalized("NFKC"),
    "bytes lowercase": lambda: _normalized("Lowercase"),
    "bytes strip": lambda: _normalized("Strip"),
    "bytes replace": lambda: _normalized("Replace", "  ", " "),
    "bytes lstrip": lambda: _added(_byte_level(add_prefix_space=False), lstrip=True),
    "bytes rstrip": lambda: _added(_byte_level(add_prefix_space=False), rstrip=True),
    "bytes both strip": lambda: _added(_byte_level(add_prefix_space=True), lstrip=True, rstrip=True),
    "metaspace first": lambda: _metaspace("first", split=False),
    "metaspace always": lambda: _metaspace("always", split=False),
    "metaspace never": lambda: _metaspace("never", split=False),
    "metaspace first split": lambda: _metaspace("first", split=True),
    "metaspace always split": lambda: _metaspace("always", split=True),
    "metaspace first bos eos": lambda: _processed(_metaspace("first", split=False), "<bos> $A <eos>"),
    "metaspace always rstrip": lambda: _added(_metaspace("always", split=False), rstrip=True),
    "metaspace first lstrip": lambda: _added(_metaspace("first", split=True), lstrip=True),
    "unigram first": lambda: _metaspace("first", split=True, unigram=True),
    "unigram always": lambda: _metaspace("always", split=True, unigram=True),
    "unigram never": lambda: _metaspace("never", split=True, unigram=True),
    "unigram first eos": lambda: _processed(_metaspace("first", split=True, unigram=True), "$A <eos>"),
    "prepend": lambda: _prepending(falls_back=False),
    "prepend fallback": lambda: _prepending(falls_back=True),
    "prepend bos": lambda: _processed(_prepending(falls_back=False), "<bos> $A"),
    "word piece": lambda: _word_piece(lowercase=False),
    "word piece lowercase": lambda: _word_piece(lowercase=True),
    "word piece cls sep": lambda: _processed(_word_piece(lowercase=True), "<bos> $A <sep>"),
}


@lru_cache
def tokenizer_of(habit: str) -> Any:
    """Return the tokenizer of a habit."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=BUILT[habit](),
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        pad_token="<eos>",
        additional_special_tokens=[] if "strip" in habit else list(MARKS[3:]),
    )
    made.chat_template = TEMPLATE
    return made
