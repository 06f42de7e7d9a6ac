/* What all sources of kernels need from the compiler. */
#ifndef FASTATTN_BASE_H
#define FASTATTN_BASE_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "../generated/floats.h"

#define INLINE static inline __attribute__((always_inline))
#define LOG2E 1.4426950408889634074
#define LN2 0.69314718055994530942

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define SHUFFLE(INDEX_TYPE, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(INDEX_TYPE, a, b, ...) __builtin_shuffle(a, b, (INDEX_TYPE){__VA_ARGS__})
#endif

#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
#define STRING_(x) #x
#define STRING(x) STRING_(x)

#endif
