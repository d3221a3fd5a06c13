/* wait.h: time, and sleeping on a word of the segment until it changes or a deadline passes. */
#ifndef PYPS_WAIT_H
#define PYPS_WAIT_H

#include "store/atomics.h"

uint64_t wait_now_nanoseconds(void);          /* CLOCK_MONOTONIC: the same clock for every process here */
int64_t wait_clock_offset(void);              /* of this process's clock from the machine's, nanoseconds */
uint64_t wait_deadline_after(double seconds); /* saturates instead of wrapping */

/* Sleeps while *word == seen, until a wake-up, a signal or the end of `nanoseconds`. Does not say which. */
void wait_on_word(const a32 *word, uint32_t seen, uint64_t nanoseconds);
void wait_wake_all(const a32 *word);

/* A mark says that a process waits on a word, by what was seen there; so one that a dead waiter left is known for old.
 * Before it sleeps a waiter sets the mark, and then looks again at what it waits for. */
void wait_announce(a32 *mark, uint32_t seen);
/* After the word has changed: may a process sleep on it? Takes an old mark away. */
bool wait_was_announced(a32 *mark, const a32 *word);

#endif
