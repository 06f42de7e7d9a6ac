"""``python -m benchmarks.dask_workers``: attention over one long sequence on 1, 2 and 4 Dask workers.

Workers are processes with one thread each, on this machine. Their chunks of query, key and value are made
beforehand and stay with them; the timed work is the graph of `fastattn.integrations.dask.attention`, from its
making until all chunks of the result are there. All numbers of workers run once in every round, in turns.
Times are medians over the rounds, and so are ratios, each taken within its round.

With fewer cores than workers, or with others at work on them, a ratio says nothing about the package: the
script prints how many cores it may use, and the CPU time of all workers, which grows by what moving chunks
between them takes. Results are compared first: the exit status is 1 where bits differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

from fastattn._machine import host
from fastattn.integrations.dask import attention


def make_inputs(heads: int, length: int, chunk: int, dim: int) -> list[Any]:
    """The same numbers for the same arguments, on any worker."""
    rng = da.random.default_rng(0)
    shape, chunks = (heads, length, dim), (1, chunk, dim)
    return [rng.standard_normal(shape, dtype=np.float32, chunks=chunks) for _ in range(3)]


def run(workers: int, args: argparse.Namespace) -> tuple[float, float, Any]:
    """Seconds, those of CPU in the workers, and the last chunk of the result.

    The cluster is the only one: idle workers take 3 % of a core each, and Dask's profiler more.
    """
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(workers)
        inputs = client.persist(make_inputs(args.heads, args.length, args.chunk, args.dim))
        wait(inputs)
        # Every worker computes once, so that its imports are no part of the times.
        small = [x[:, : 2 * args.chunk * workers] for x in inputs]
        client.compute(attention(*small, window=(0, 0)).sum()).result()
        busy = -sum(client.run(time.process_time).values())
        start = time.perf_counter()
        out = client.persist(attention(*inputs, causal=True))
        wait(out)
        seconds = time.perf_counter() - start
        busy += sum(client.run(time.process_time).values())
        return seconds, busy, client.compute(out[:, -args.chunk :]).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0].partition(": ")[2])
    parser.add_argument("--length", type=int, default=65536, help="queries and keys (65536)")
    parser.add_argument("--chunk", type=int, default=8192, help="of queries and of keys (8192)")
    parser.add_argument("--heads", type=int, default=2, help="(2)")
    parser.add_argument("--dim", type=int, default=64, help="head_dim (64)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args()

    times: dict[int, list[float]] = {workers: [] for workers in args.workers}
    cpu: dict[int, list[float]] = {workers: [] for workers in args.workers}
    results: dict[int, Any] = {}
    for number in range(args.rounds):
        order = args.workers[number % len(args.workers) :] + args.workers[: number % len(args.workers)]
        for workers in order:
            seconds, of_cpu, results[workers] = run(workers, args)
            times[workers].append(seconds)
            cpu[workers].append(of_cpu)
    first = args.workers[0]
    flops = 2 * args.heads * args.length * (args.length + 1) * args.dim
    print(
        f"{args.heads} heads, {args.length} queries and keys, causal, D = {args.dim}, chunks of {args.chunk}"
    )
    print(f"{host.available_cores()} cores; median of {args.rounds} rounds")
    for workers, seconds in times.items():
        ratios = [one / other for one, other in zip(times[first], seconds, strict=True)]
        rate = flops / median(seconds) / workers / 1e9
        print(
            f"{workers} workers: {median(seconds):6.2f} s, {rate:5.1f} GFLOP/s each, "
            f"{median(ratios):.2f} x {first} ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"{median(cpu[workers]):.2f} s of CPU in all"
        )
    if any(x.tobytes() != results[first].tobytes() for x in results.values()):
        print("the bits of the results differ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
