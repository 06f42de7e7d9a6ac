"""The benchmark on a GPU, ``python -m fastattn bench --gpu``: one process, times by events of the device.

Libraries on a GPU share nothing that is worth a process of its own: all queue their work on the default
stream, and what is between two events on it is the time of one library's calls. Nothing here is used on the
CPU, and nothing of the CPU's worker and crew here; cases, inputs, the right answers and the tolerance are
the same.
"""
