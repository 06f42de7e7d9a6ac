"""A BERT sentence encoder in NumPy: everything between the text and its embedding.

The encoder is a stack of equal layers over ``x``, one row per token::

    x = layer_norm(x + attention(x))
    x = layer_norm(x + linear(gelu(linear(x))))

and the embedding of a text is the mean of its rows in the last layer, scaled to length 1.
The attention is passed in as a function, so that the same model runs with `fastattn` and without it.

Letters: ``B`` texts in a batch, ``L`` tokens per text after padding, ``H`` heads, ``D`` head_dim.

References
----------
Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019).
Reimers and Gurevych, "Sentence-BERT" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastattn.demo._errors import DemoError, tokenizers_errors
from fastattn.demo._layers import LayerNorm, Linear, gelu, gelu_tanh
from fastattn.demo.embed.attention import Attend, Floats, Ints

if TYPE_CHECKING:
    from tokenizers import BertWordPieceTokenizer, Encoding, Tokenizer

# ---- activations, by the names of Hugging Face


def relu(x: Floats) -> Floats:
    out: Floats = np.maximum(x, 0)
    return out


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
}


# ---- the model


@dataclass(frozen=True)
class Layer:
    """One encoder layer."""

    query_key_value: Linear  #: the three projections side by side, ``(3 * H * D, hidden)``
    attention_output: Linear
    attention_norm: LayerNorm
    intermediate: Linear
    activation: Callable[[Floats], Floats]
    output: Linear
    output_norm: LayerNorm

    def __call__(self, x: Floats, lengths: Ints, num_heads: int, attend: Attend) -> Floats:
        """The next state of ``x``, ``(B * L, hidden)``."""
        batch = len(lengths)
        # Query, key and value are views into one product: (B, L, H, D) each, and no copy is made of them.
        query, key, value = np.moveaxis(
            self.query_key_value(x).reshape(batch, len(x) // batch, 3, num_heads, -1), 2, 0
        )
        context = attend(query, key, value, lengths).reshape(x.shape)
        x = self.attention_norm(x + self.attention_output(context))
        return self.output_norm(x + self.output(self.activation(self.intermediate(x))))


@dataclass(frozen=True)
class SentenceEncoder:
    """A tokenizer and a transformer that turn a text into a vector."""

    tokenizer: Tokenizer | BertWordPieceTokenizer
    lower_case: bool  #: whether to lower the text before the tokenizer sees it
    query_prompt: str  #: what stands before a query, and
    text_prompt: str  #: before a text that is searched, for the model to tell them apart
    max_tokens: int  #: the longest text the model reads, with its special tokens
    num_heads: int
    words: Floats  #: ``(vocabulary, hidden)``
    positions: Floats  #: ``(max_tokens or more, hidden)``, from the first position that a token can have
    segment: Floats  #: ``(hidden,)``, the same for every token when there is one text
    embedding_norm: LayerNorm
    layers: tuple[Layer, ...]
    pooling: str  #: "mean" of the tokens, or the first token, "cls"

    def tokenize(self, texts: Sequence[str]) -> list[Encoding]:
        """The tokens of each text, all of them: `cut` is a separate step, so that it can be told of."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        with tokenizers_errors("the model's tokenizer does not work"):
            encodings = self.tokenizer.encode_batch(list(texts))
        largest = max((max(encoding.ids, default=0) for encoding in encodings), default=0)
        if largest >= len(self.words):
            raise DemoError(
                f"the model's tokenizer gives the id {largest}, and it has {len(self.words)} tokens"
            )
        return encodings

    def cut(self, encoding: Encoding) -> Ints:
        """The ids of a text, no more than ``max_tokens`` of them; the special tokens stay at both ends."""
        ids = np.array(encoding.ids, np.int64)
        if len(ids) <= self.max_tokens:
            return ids
        special = np.array(encoding.special_tokens_mask, bool)
        ordinary = np.flatnonzero(~special)
        return np.delete(ids, ordinary[len(ordinary) - (len(ids) - self.max_tokens) :])

    def token_names(self, ids: Ints) -> list[str]:
        """How each token reads, for people."""
        names = [self.tokenizer.decode([int(token)], skip_special_tokens=False) for token in ids]
        return [name.strip() or str(token) for name, token in zip(names, ids, strict=True)]

    def encode(self, texts: Sequence[Ints], attend: Attend) -> Floats:
        """The embeddings ``(B, hidden)``, each of length 1, of the texts whose token ids are given.

        The texts of a batch have unequal lengths. They are padded to the longest, and ``lengths`` says how
        many tokens of each are real: attention must not look beyond, and the rest works on each token alone.
        """
        lengths = np.array([len(ids) for ids in texts], np.int64)
        padded = np.zeros((len(texts), lengths.max()), np.int64)
        for row, ids in zip(padded, texts, strict=True):
            row[: len(ids)] = ids

        x = self.words[padded] + self.positions[: padded.shape[1]] + self.segment
        x = self.embedding_norm(x.reshape(-1, x.shape[-1]))
        for layer in self.layers:
            x = layer(x, lengths, self.num_heads, attend)
        x = x.reshape(*padded.shape, -1)

        if self.pooling == "cls":
            pooled = x[:, 0]
        else:
            x[np.arange(x.shape[1]) >= lengths[:, None]] = 0
            pooled = x.sum(axis=1) / lengths[:, None].astype(np.float32)
        embeddings: Floats = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
        if not np.isfinite(embeddings).all():
            raise DemoError("the model's weights are not finite, or so large that what is computed is not")
        return embeddings


def batches_by_length(texts: Sequence[Ints], batch_size: int) -> list[Ints]:
    """Which texts to compute together: batches of neighbours in length, so that little is padded.

    The longest come first, so that a progress bar only becomes faster.
    """
    order = np.argsort([-len(ids) for ids in texts], kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
