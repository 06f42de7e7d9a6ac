"""Attention on CPUs, side by side, against the machine's limit.

Run as ``python -m fastattn bench``; `benchmarks/README.md` in the repository says how to read
the result. The flow, each line importing only what stands above it::

    probes/       what the machine can do at most, in an extension of its own
    cases.py      what is computed: shapes, options, origin, FLOPs
    oracle.py     the right answer, in a higher precision than the case
    peers/        how each library computes a case
    limits.py     which limit of the machine binds a case
    memory.py     the peak of one call's memory
    worker.py     one process that holds one library and answers commands over a pipe
    process.py    the other end of that pipe; keeps idle workers stopped
    records.py    what is measured, as plain records
    intervals.py  medians and their bootstrap intervals
    summary.py    ratios with intervals, shares of the limit
    measure.py    check, then interleaved rounds until the ratios are known
    document.py   the JSON: built, written, read back
    compare.py    two documents: did we become slower?
    report.py     tables
    flat.py       the JSON as one table: CSV, Markdown
    plots/        pictures of the JSON
    cli.py        the command line
"""
