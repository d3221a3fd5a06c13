/* atomics.h: every memory order of the store, in one place.
 *
 * Three strengths are enough: `relaxed` for counters, `acquire`/`release` to pass plain memory from one
 * process to another, and `seq_cst` for the one pattern that needs a total order, the hazard:
 *
 *     reader                         participant that wants the buffer back
 *     (R1) hazard = buffer           (W1) see that the word names another buffer
 *     (R2) read the word again       (W2) read every hazard
 *
 * In the total order either R1 is before W2, and W2 sees the hazard; or W2 is before R1, hence W1 is before
 * R2, and the reader sees that the word has changed and lets go: a word never comes back. For a chunk's
 * buffer the word is the chunk's, for a view's buffer the view's. For the staging buffer of a ticket it is
 * every chunk's: all have changed when all have that ticket, and the reader reads again the word of its
 * chunk.
 *
 * There are no fences: every order belongs to an access, which the thread sanitizer and readers can follow.
 */
#ifndef PYPS_ATOMICS_H
#define PYPS_ATOMICS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef _Atomic uint64_t a64;
typedef _Atomic uint32_t a32;

/* Lock-free and address-free: a process may map the segment at another address. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "needs lock-free 32 and 64-bit atomics");
_Static_assert(sizeof(a64) == 8 && sizeof(a32) == 4, "atomics must have the layout of the plain types");

static inline uint64_t load_relaxed(const a64 *p) { return atomic_load_explicit(p, memory_order_relaxed); }
static inline uint64_t load_acquire(const a64 *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline uint64_t load_seq(const a64 *p) { return atomic_load_explicit(p, memory_order_seq_cst); }
static inline void store_relaxed(a64 *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_relaxed); }
static inline void store_release(a64 *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline void store_seq(a64 *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_seq_cst); }

/* On success seq_cst, so that a reader of the new word sees what was written before it. */
static inline bool cas_seq(a64 *p, uint64_t expected, uint64_t desired) {
    return atomic_compare_exchange_strong_explicit(p, &expected, desired, memory_order_seq_cst,
                                                   memory_order_relaxed);
}

static inline uint32_t load32_acquire(const a32 *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline void store32_release(a32 *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline uint32_t load32_seq(const a32 *p) { return atomic_load_explicit(p, memory_order_seq_cst); }
static inline void add32_seq(a32 *p, uint32_t v) { atomic_fetch_add_explicit(p, v, memory_order_seq_cst); }
static inline uint32_t sub32_seq(a32 *p, uint32_t v) {
    return atomic_fetch_sub_explicit(p, v, memory_order_seq_cst);
}
static inline uint32_t next32_relaxed(a32 *p) {
    return atomic_fetch_add_explicit(p, 1, memory_order_relaxed);
}
static inline void max32(a32 *p, uint32_t v) {
    uint32_t found = load32_acquire(p);
    while (found < v && !atomic_compare_exchange_weak(p, &found, v)) {
    }
}
static inline void min64(a64 *p, uint64_t v) {
    uint64_t found = load_acquire(p);
    while (found > v && !atomic_compare_exchange_weak(p, &found, v)) {
    }
}
static inline uint64_t add64_relaxed(a64 *p, uint64_t v) {
    return atomic_fetch_add_explicit(p, v, memory_order_relaxed);
}

#endif
