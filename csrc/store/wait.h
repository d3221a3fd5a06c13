/* wait.h: time, and sleeping on a word of the segment until it changes or a deadline passes. */
#ifndef PYPS_WAIT_H
#define PYPS_WAIT_H

#include "store/atomics.h"

uint64_t wait_now_nanoseconds(void);          /* CLOCK_MONOTONIC: the same clock for every process here */
uint64_t wait_deadline_after(double seconds); /* saturates instead of wrapping */

/* Sleeps while *word == seen, until a wake-up, a signal or the end of `nanoseconds`. Does not say which. */
void wait_on_word(const a32 *word, uint32_t seen, uint64_t nanoseconds);
void wait_wake_all(const a32 *word);

#endif
