"""Four demos of transformers in NumPy, whose attention is fastattn's.

================  =================================================================================
``generate/``     a language model: text from a prompt, token by token, with `fastattn.KVCache`
``embed/``        a sentence transformer: texts by nearness of meaning, with `fastattn.attention`
``train/``        a small language model, trained on a text, with `fastattn.attention_backward`
``image/``        a vision transformer: what it sees in a picture, with `fastattn.attention`
``_command.py``   what the commands share: options, messages, exit status, a progress bar
``_decoding.py``  attention with what came before, in `fastattn.KVCache`, and the choice of the next token
``_layers.py``    what encoders are made of beside attention: linear layers, layer norms, GELU
``_timing.py``    both kinds of attention in the same work, timed in turns
``_files.py``     text files that the user names
``_figures.py``   pictures that are saved under a name of the user's
``_errors.py``    the one exception, something its user can put right
================  =================================================================================

Each compares itself with the plain NumPy formula in the same model. Without a name the command is `generate`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

DEMOS = ("generate", "embed", "train", "image")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo that the first word names, `generate` where it names none; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] not in DEMOS and not words[0].startswith("-"):
        print(f"fastattn demo: no demo called {words[0]}; there are: {', '.join(DEMOS)}", file=sys.stderr)
        return 2
    name = words.pop(0) if words and words[0] in DEMOS else DEMOS[0]
    if name == "embed":
        from fastattn.demo.embed import main as demo
    elif name == "train":
        from fastattn.demo.train import main as demo
    elif name == "image":
        from fastattn.demo.image import main as demo
    else:
        from fastattn.demo.generate import main as demo
    return demo(words)
