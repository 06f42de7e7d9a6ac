"""How the kernels become machine code: vectors in LLVM IR, register tiles, calls by address."""
