/* runs.h: what is kept of a run: states, and a journal of decisions on file, which store/journal.c writes and replay.c
 * reads.
 *
 * The file is a sequence of entries, one for each event: the event with its time and measurements, its
 * outcome, and a digest of the view after it. An event that changed nothing (a worker waits, continues or is
 * refused) is written with the view it was decided on. Every handle first writes the view that it finds. In
 * the order of views the entries are the run's decisions, whichever process took them, so a replay starts at
 * the first view on file and takes the same steps. A run that is resumed has a new store, which appends to the same
 * file: each store's entries are a run of their own.
 *
 * A process that is killed between its CAS and its write loses that entry. The replay continues from the next
 * view on file and counts the events between as missing.
 */
#ifndef PYPS_RUNS_H
#define PYPS_RUNS_H

#include "policy/decisions.h"

#define JOURNAL_MAX_ENTRY_BYTES (UINT32_C(1) << 30)
#define JOURNAL_MARK            UINT32_C(0x326e726a) /* "jrn2" */

/* Followed by [count] batches (EVENT_REPLAN) or turns (EVENT_SCHEDULE), or by the view itself (EVENT_NONE), then
 * padding. */
struct journal_entry {
    uint32_t mark;  /* JOURNAL_MARK */
    uint32_t bytes; /* of the entry and what follows it; a multiple of 8 */
    uint64_t store; /* drawn when its store was made */
    uint64_t
        sequence; /* of the view that the event led to; if it changed nothing, of the one it was decided on */
    uint64_t digest; /* of the view that the event led to; 0: it changed nothing */
    uint64_t verdict;
    struct event event;
    struct outcome outcome;
};

/* replay.c */
uint64_t journal_digest(const struct view *view);

/* view_state.c */
uint32_t view_state_ranges(const struct view *view); /* the most ranges that a state of it has */
/* The state that this private view is in. `out` points to ranks [ranks] and ranges [view_state_ranges], which
 * it fills; nothing is said of steps, vectors and residuals. */
int view_capture(struct view *view, pyps_state *out, pyps_rank_state *ranks, pyps_range *ranges);
/* A view just made becomes one that goes on from the state; PYPS_EINVAL names what is out of range in it. */
int view_restore(struct view *view, const pyps_state *state);

#endif
