"""Text to token ids and back, by the vocabulary in a GGUF file: both kinds that LLaMA models have."""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from fastattn.demo._errors import DemoError, tokenizers_errors
from fastattn.demo.generate.gguf_file import GGUFFile
from fastattn.demo.generate.template import render

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

#: What GGUF says of each token.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: How text is cut before byte-pair merges, by the name in the file: what is cut out, one after another.
CUTS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (GPT2_WORDS,),
    "smollm": (r"\p{N}", GPT2_WORDS),
    "llama-bpe": (LLAMA3_WORDS,),
}
#: No vocabulary has a longer token, in characters; the tokenizer takes the square of it.
MAX_TOKEN = 2**10

#: Tokens that end a turn, beside those that the file names.
END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")

Message = Mapping[str, str]  # "role" and "content"


class TextTokenizer:
    """The tokens of a model, its special tokens, and how it wants a conversation to look."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.tokens = file.array("tokenizer.ggml.tokens", str)
        if len(longest := max(self.tokens, key=len, default="")) > MAX_TOKEN:
            raise DemoError(
                f"{file.path}: a token has {len(longest)} characters, {longest[:20]!r} first, expected "
                f"{MAX_TOKEN} at most"
            )
        if len(set(self.tokens)) < len(self.tokens):
            twice = Counter(self.tokens).most_common(1)[0][0]
            raise DemoError(f"{file.path}: tokenizer.ggml.tokens has {twice!r:.80} twice")
        kinds = self._of_each_token("token_type", int, [NORMAL] * len(self.tokens))
        if wrong := set(kinds) - set(range(BYTE + 1)):
            raise DemoError(f"{file.path}: tokenizer.ggml.token_type has {wrong.pop()}, expected 0 to {BYTE}")
        self._control = {number for number, kind in enumerate(kinds) if kind == CONTROL}
        self._literal = {number for number, kind in enumerate(kinds) if kind == USER_DEFINED}
        self._model = file.get("tokenizer.ggml.model", str)
        match self._model:
            case "gpt2":
                self._tokenizer = _byte_level(file, self.tokens)
            case "llama":
                scores = self._of_each_token("scores", float)
                if not all(map(math.isfinite, scores)):
                    raise DemoError(f"{file.path}: tokenizer.ggml.scores has numbers that are not finite")
                self._tokenizer = _sentence_piece(file, self.tokens, kinds, scores)
            case other:
                raise DemoError(
                    f"{file.path}: tokenizer.ggml.model is {other!r}, and the demo can do gpt2, llama only"
                )
        _add_special(self._tokenizer, self.tokens, kinds)
        self.bos = self._special("bos")
        default = self._model == "llama" or file.get("tokenizer.ggml.pre", str, "") == "llama-bpe"
        self._begins_with_bos = file.get("tokenizer.ggml.add_bos_token", bool, default)
        if self._begins_with_bos and self.bos is None:
            raise DemoError(
                f"{file.path}: tokenizer.ggml.bos_token_id is missing, and every text begins with that token"
            )
        named = {self._special(name) for name in ("eos", "eot", "eom")}
        by_name = {number for number in self._control if self.tokens[number] in END_NAMES}
        self.ends = frozenset(number for number in named | by_name if number is not None)

    def _of_each_token(self, name: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        key = f"tokenizer.ggml.{name}"
        values = self._file.array(key, kind, default)
        if len(values) != len(self.tokens):
            raise DemoError(
                f"{self._file.path}: {key} has {len(values)} numbers, and there are {len(self.tokens)} tokens"
            )
        return values

    def _special(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._file.values:
            return None
        number = self._file.get(key, int)
        if not 0 <= number < len(self.tokens):
            raise DemoError(f"{self._file.path}: {key} is {number}, and there are {len(self.tokens)} tokens")
        return number

    def encode(self, text: str) -> list[int]:
        """Token ids, with the token that begins a text where the model wants one."""
        with tokenizers_errors(f"{self._file.path}: the tokenizer does not work"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._begins_with_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids

    def bytes_of(self, number: int) -> bytes:
        """What a token stands for in UTF-8, part of a character perhaps; nothing for a control token."""
        text = self.tokens[number]
        if number in self._control:
            return b""
        if self._model == "gpt2":
            table = _bytes_by_character()
            if number in self._literal or not table.keys() >= set(text):
                return text.encode()
            return bytes(table[character] for character in text)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()

    def texts_of(self, numbers: Sequence[int]) -> list[str]:
        """Each token for itself, control tokens by their name."""
        return [
            self.tokens[number] if number in self._control else self.bytes_of(number).decode(errors="replace")
            for number in numbers
        ]

    def stream(self, numbers: Iterator[int]) -> Iterator[str]:
        """The text of tokens as they come; a character is held back until it is whole."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for number in numbers:
            yield decoder.decode(self.bytes_of(number))
        yield decoder.decode(b"", final=True)

    def conversation(self, messages: Sequence[Message]) -> str:
        """The text of a conversation as far as the model's next turn, by the template in the file.

        Without a template, as in a model that was not trained to converse, the contents one after another.
        """
        if "tokenizer.chat_template" not in self._file.values:
            return "\n".join(message["content"] for message in messages)
        template = self._file.get("tokenizer.chat_template", str)
        names = {f"{name}_token": self._name(name) for name in ("bos", "eos")}
        try:
            return render(template, messages, names)
        except ValueError as error:
            raise DemoError(f"{self._file.path}: the chat template does not work: {error}") from None

    def _name(self, special: str) -> str:
        number = self._special(special)
        return "" if number is None else self.tokens[number]


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
    """GPT-2's kind: text is cut into words, and pairs of their bytes are merged in the order of the file."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    kind = file.get("tokenizer.ggml.pre", str, "gpt-2")
    if kind not in CUTS:
        raise DemoError(
            f"{file.path}: tokenizer.ggml.pre is {kind!r}, and the demo can do {', '.join(CUTS)} only"
        )
    merges = []
    for merge in file.array("tokenizer.ggml.merges", str):
        one, _, other = merge.partition(" ")
        merges.append((one, other))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with tokenizers_errors(f"{file.path}: the vocabulary and its merges do not fit"):
        # A word of Llama 3 that is a token is taken whole, whatever the merges say.
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    cuts = [pre_tokenizers.Split(Regex(words), "isolated") for words in CUTS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    return tokenizer


def _sentence_piece(
    file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> Tokenizer:
    """SentencePiece's kind: pieces are merged where the result has the best score; else a piece is a byte."""
    from tokenizers import Tokenizer, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    pairs = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -scores[vocabulary[piece]])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds)
    )
    space = normalizers.Replace(" ", "▁")
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    else:
        tokenizer.normalizer = space
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Tokens that are looked for before anything else is done to a text."""
    from tokenizers import AddedToken

    tokenizer.add_tokens(  # at once: each call reads all of them
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


@cache
def _bytes_by_character() -> dict[str, int]:
    """GPT-2 writes a byte as a character: itself where that is visible, else the next one from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}
