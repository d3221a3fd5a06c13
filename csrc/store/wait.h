/* wait.h: time, and sleeping on a word of the segment until it changes or a deadline passes. */
#ifndef PYPS_WAIT_H
#define PYPS_WAIT_H

#include "store/atomics.h"

uint64_t now_nanoseconds(void);          /* CLOCK_MONOTONIC: the same clock for every process here */
uint64_t deadline_after(double seconds); /* saturates instead of wrapping */

/* Sleeps while *word == seen, until woken, `nanoseconds` pass, or a signal comes. Says nothing about why. */
void word_wait(const a32 *word, uint32_t seen, uint64_t nanoseconds);
void word_wake_all(const a32 *word);

#endif
