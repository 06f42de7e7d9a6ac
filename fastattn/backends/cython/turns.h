/* Turns: threads that add to the same memory, one after another, in an order that the problem alone decides. */
#ifndef FASTATTN_TURNS_H
#define FASTATTN_TURNS_H

#include <stdint.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#undef near /* leftovers of 16 bits */
#undef far
#define fastattn_yield() SwitchToThread()
#else
#include <sched.h>
#define fastattn_yield() sched_yield()
#endif

/* Tells the core that the thread busy-waits. */
#if defined(__x86_64__) || defined(__i386__)
#define FASTATTN_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define FASTATTN_PAUSE() __asm__ volatile("yield")
#else
#define FASTATTN_PAUSE() (void)0
#endif

/* Waits until the turn is `number`, and sees what was written before it was passed. Whoever has it now runs, so the wait
 * is short; where that thread lost its core, this one gives up its own. */
static inline void fastattn_wait_for_turn(int64_t *turn, int64_t number) {
    for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != number; spins++) {
        if (spins >= 1 << 10) fastattn_yield();
        FASTATTN_PAUSE();
    }
}

static inline void fastattn_pass_turn(int64_t *turn, int64_t number) { __atomic_store_n(turn, number, __ATOMIC_RELEASE); }

#endif
