"""Attention on CPUs, side by side, against the machine's limit.

Run as ``python -m fastattn bench``; `benchmarks/README.md` in the repository says how to read
the result. The flow, each line importing only what stands above it::

    cases.py      what is computed: shapes, options, origin, FLOPs, targets
    oracle.py     the right answer, in a higher precision than the case
    peers/        how each library computes a case
    worker.py     one process that holds one library and answers commands over a pipe
    process.py    the other end of that pipe; keeps idle workers stopped
    measure.py    check, then interleaved rounds
    summary.py    ratios, intervals, shares of the peak, verdicts
    report.py     tables and JSON
    plots/        pictures of the JSON
    cli.py        the command line
"""
