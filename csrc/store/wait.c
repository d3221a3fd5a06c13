/* wait.c: futex on shared memory. A wake-up can be lost with the process that dies before it, so callers wait
 * in slices of their deadline and read the word again: they depend on the word, never on the wake-up. */
#include "store/wait.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t wait_now_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A time namespace shifts the clock of the processes in it; 0 where the kernel has none. */
int64_t wait_clock_offset(void) {
    long seconds = 0, nanoseconds = 0;
    FILE *file = fopen("/proc/self/timens_offsets", "re");
    if (!file) return 0;
    if (fscanf(file, "monotonic %ld %ld", &seconds, &nanoseconds) != 2) seconds = nanoseconds = 0;
    fclose(file);
    return seconds * 1000000000 + nanoseconds;
}

uint64_t wait_deadline_after(double seconds) {
    uint64_t now = wait_now_nanoseconds();
    double nanoseconds = seconds * 1e9;
    if (!(nanoseconds > 0)) return now; /* NaN, too */
    return nanoseconds >= 9e18 ? UINT64_MAX : now + (uint64_t)nanoseconds;
}

void wait_on_word(const a32 *word, uint32_t seen, uint64_t nanoseconds) {
    struct timespec t = {.tv_sec = (time_t)(nanoseconds / 1000000000u),
                         .tv_nsec = (long)(nanoseconds % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

void wait_wake_all(const a32 *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static uint32_t mark_of(uint32_t seen) { return seen ? seen : 1; } /* 0 is no mark */

void wait_announce(a32 *mark, uint32_t seen) {
    atomic_store_explicit(mark, mark_of(seen), memory_order_seq_cst);
}

bool wait_was_announced(a32 *mark, const a32 *word) {
    uint32_t found = load32_seq(mark);
    if (found && found != mark_of(load32_seq(word)))
        atomic_compare_exchange_strong_explicit(mark, &(uint32_t){found}, 0, memory_order_seq_cst,
                                                memory_order_relaxed);
    return found;
}
