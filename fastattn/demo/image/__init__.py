"""The demo of images: a real vision transformer in NumPy whose attention is `fastattn.attention`.

Read it in this order:

=============  ======================================================================================
attention.py   attention twice, with fastattn and with the plain formula; weights of the class token
model.py       DINOv2 in NumPy: from pixels to features of patches
loading.py     the weights, from an ONNX file
photograph.py  what is looked at: a file of the user's, or one that matplotlib brings; its pixels
components.py  features as colours
picture.py     the photograph, the colours and what each head attends to, drawn
cli.py         the command, which puts these together
=============  ======================================================================================
"""

from fastattn.demo.image.cli import main

__all__ = ["main"]
