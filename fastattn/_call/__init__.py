"""One call as data, below all backends: its options, arguments, storage, problem and schedule."""
