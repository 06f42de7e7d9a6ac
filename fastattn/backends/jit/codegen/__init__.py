"""Code generation in LLVM IR: the host's registers, vectors of them, and functions on these."""
