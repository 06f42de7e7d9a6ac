"""The caller's functions, `score_mod` and `mask_mod`, for every backend.

`functions`    the way in: a function, its `aux` and a dtype give a compiled loop, which is remembered
`identity`     what makes two functions the same, and which arrays they read from outside
`frontend`     the function as one of Numba's, with all that it calls inlined and every index checked
`literals`     numbers in the code take the dtype of the scores
`vector_math`  exp, exp2 and tanh that run on many scores at once
`checks`       reading an array at an index that may lie outside
`loops`        the loop over a tile around the function, written as LLVM IR, with an address that C can call
`memory`       how `aux` and captured arrays reach compiled code
`messages`     what is said of functions that do not compile, or read outside of an array
`mask_map`     a mask_mod evaluated tile by tile

Numba is a compiler here and nothing more: any driver calls the loop through its address, once per tile. Code
is compiled in for what does not change (the function, its numbers), and everything that may is read at each
call (`aux`, captured arrays, sizes). The loops are kept in a bounded cache; one that is dropped lives on as
long as a call uses it. Nothing here knows a backend; of ``numba.codegen`` it uses the host's registers.
"""
