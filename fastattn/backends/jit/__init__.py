"""The caller's functions, `score_mod` and `mask_mod`, for every backend.

`codegen`      LLVM IR: the host's registers, vectors of them, and functions on these, also for the backend
`functions`    the interface: a function, its `aux` and a dtype give a compiled loop, which is cached
`identity`     what makes two functions equal, and which arrays they capture
`frontend`     the function compiled by Numba, with all that it calls inlined and every index checked
`literals`     numbers in the code take the dtype of the scores
`pairs`        numbers with a derivative, as types
`derivatives`  operators and functions on these, by a rule each
`vector_math`  exp, exp2 and tanh that LLVM vectorises
`checks`       array reads with a bounds check
`lowering`     what is refused, with its line: what takes the GIL, and reads that no check covers
`loops`        the loop over a tile around the function, or its derivative, as LLVM IR, with an address for C
`memory`       how `aux` and captured arrays are passed to compiled code
`messages`     errors for functions that do not compile, or read outside of an array
`mask_map`     a mask_mod evaluated tile by tile
`loading`      what drivers ask before Numba is loaded

Numba is only the compiler here: any driver calls the loop through its address, once per tile. What does not
change is compiled in (the function, its numbers); what may change is read at each call (`aux`, captured
arrays, sizes). The loops are kept in a bounded cache; one that is evicted is freed when no call uses it any
more. Nothing here knows a backend.
"""
