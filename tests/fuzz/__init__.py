"""A differential fuzzer: random problems over every option, against the definition.

::

    python -m tests.fuzz --cases 1000000 --processes 2       # all engines of this machine, seeds 0, 1, ...
    python -m tests.fuzz --cases 100000 --seed 1000000       # goes on with other seeds
    python -m tests.fuzz --kinds linear,kernels              # of these kinds of cases alone
    python -m tests.fuzz --sanitize --cases 100000           # a build with AddressSanitizer and UBSan
    python -m tests.fuzz --malloc-failures --cases 100000    # the driver's malloc fails now and then
    python -m tests.fuzz --forks 1000 --threads 8            # children forked while eight threads work
    python -m tests.fuzz --record '{"kind": ...}'            # one case, or a file of cases

A case is a record that JSON can hold, drawn from its seed (`records`). `build` makes its arrays, `checks`
runs it on one engine (a backend, and an instruction set) and compares:

* every result with `oracle`, the definition in a wider type, within the budget of `tests.tolerances`;
* the bits of the same call again, with other threads, on contiguous copies, on one batch item alone, in the
  other layout, into a strided `out` or over the query, with fewer or more results, and with other numbers in
  all that is masked;
* the inputs and the bytes around `out`, which must not change;
* that a call with one thing wrong (`spoils`) is refused and writes nothing;
* `varlen_attention`, `merge_attention`, `Paged`, `Quantized`, `attention_backward`, and histories of
  `KVCache` (`histories`); `linear_attention`, `rope`, and sums of Gaussian kernels (`beside`);
  `MultiHeadAttention`, alone and with a cache (`layers`); `gated_linear_attention` (`recurrent`);
  `reduce_scores`, `key_weights` and `max_similarity` (`reductions`); bias objects, with gradients (`biases`);
* `flex_attention` of functions drawn at random (`trees`) with a Python loop over the allowed pairs
  (`functions`).

Cases run in processes of their own (`worker`), so that a crash or a hang ends a case, not the run (`runner`).
A case that fails is made small while it fails in the same manner (`shrink`) and printed. When its cause is
mended, its record goes to ``corpus/``, which `tests/test_fuzz.py` replays in the default run.
"""
