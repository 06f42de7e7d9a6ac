"""The demo of embedding: a real sentence transformer in NumPy whose attention is `fastattn.attention`.

Read it in this order:

=============  ====================================================================
attention.py   attention twice: with fastattn, and with the plain formula
model.py       BERT in NumPy: from token ids to an embedding
loading.py     the weights, the settings and the tokenizer, from a folder
corpus.py      the demo's own sentences and passages, and its queries
text.py        what is searched: these, or the lines of a file
picture.py     the attention weights of one sentence
cli.py         the command, which puts these together
=============  ====================================================================
"""

from fastattn.demo.embed.cli import main

__all__ = ["main"]
