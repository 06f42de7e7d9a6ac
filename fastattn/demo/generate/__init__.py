"""The demo of generation: a real language model in NumPy with `fastattn.KVCache` and `fastattn.rope`.

Read it in this order:

==============  ==========================================================================
attention.py    what the model calls, and the plain formula; fastattn's cache is in ``_decoding.py``
clock.py        where the time goes
model.py        LLaMA in NumPy: from token ids to logits
gguf_file.py    a GGUF file, checked as it is read
loading.py      the weights and the settings in it
tokenizer.py    text to token ids and back
template.py     the form of a conversation, by a program in the file
generation.py   a prompt, then one token after another
comparison.py   the same with the plain formula
perplexity.py   how well a text is predicted, with each storage type of the cache
heads.py        what one head of the model reads while it writes
picture.py      times and that head, drawn
corpus.py       the demo's own text
cli.py          the command, which puts these together
==============  ==========================================================================
"""

from fastattn.demo.generate.cli import main

__all__ = ["main"]
