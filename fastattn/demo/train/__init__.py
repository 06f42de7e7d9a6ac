"""The demo of training: a language model of characters in NumPy, with `fastattn.attention_backward`.

Read it in this order:

=============  ======================================================================================
attention.py   attention and its gradients twice: with fastattn, and with the plain formula
model.py       a transformer in NumPy: from characters to the loss, and back to all gradients
optimizer.py   AdamW, the learning rate of each step, and clipping
text.py        what is read: a file or Python's own documentation, and how well counting predicts it
training.py    the steps, what is noted of them, and samples of what the model writes
timing.py      both kinds of attention in the same steps, timed side by side
picture.py     the loss, and where the time goes, drawn
cli.py         the command, which puts these together
=============  ======================================================================================
"""

from fastattn.demo.train.cli import main

__all__ = ["main"]
