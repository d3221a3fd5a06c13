/* journal.h: a journal of decisions on file; store/journal.c writes it, replay.c reads it.
 *
 * The file is a sequence of entries, one for each event: the event with its time and measurements, its
 * outcome, and a digest of the view after it. An event that changed nothing (a worker waits, continues or is
 * refused) is written with the view it was decided on. Every handle first writes the view that it finds. In
 * the order of views the entries are the run's decisions, whichever process took them, so a replay starts at
 * the first view on file and takes the same steps.
 *
 * A process that is killed between its CAS and its write loses that entry. The replay continues from the next
 * view on file and counts the events between as missing.
 */
#ifndef PYPS_POLICY_JOURNAL_H
#define PYPS_POLICY_JOURNAL_H

#include "policy/view.h"

#define JOURNAL_MAX_ENTRY_BYTES (UINT32_C(1) << 30)
#define JOURNAL_MARK            UINT32_C(0x6c6e726a) /* "jrnl" */

/* Followed by [count] batches (EVENT_REPLAN) or turns (EVENT_SCHEDULE), or by the view itself (EVENT_NONE), then
 * padding. */
struct journal_entry {
    uint32_t mark;  /* JOURNAL_MARK */
    uint32_t bytes; /* of the entry and what follows it; a multiple of 8 */
    uint64_t
        sequence; /* of the view that the event led to; if it changed nothing, of the one it was decided on */
    uint64_t digest; /* of the view that the event led to; 0: it changed nothing */
    uint64_t verdict;
    struct event event;
    struct outcome outcome;
};

/* replay.c */
uint64_t journal_digest(const struct view *view);

#endif
