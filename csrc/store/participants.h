/* participants.h: who comes, waits and is gone. */
#ifndef PYPS_PARTICIPANTS_H
#define PYPS_PARTICIPANTS_H

#include "store/apply.h"

/* reap.c */
int member_leave(pyps_store *s, uint32_t slot, uint64_t id, uint32_t state,
                 bool *changed);                       /* PYPS_LEFT, _DEAD */
int slot_reap_dead(pyps_store *s, uint32_t *dead_out); /* every slot whose participant is dead */
struct waiting {
    uint32_t kind;            /* PYPS_WAITS_START ... */
    uint64_t since, deadline; /* nanoseconds; both move on by the time for which this process was stopped */
};
struct waiting waiting_until(uint32_t kind, uint64_t deadline);
/* Sleeps until the view is another one than `seen`, the time `at` has come (0: no such time) or a slice of the
 * deadline has passed. Then reaps the dead, does what the view's next_deadline asks for, and fences late members if
 * the wait has lasted for a round timeout. PYPS_ETIMEDOUT at the deadline, PYPS_EINTR if the process says so. */
int view_wait_for_others(pyps_store *s, struct waiting *waiting, uint32_t seen, uint64_t at);
/* Commits `e`, and waits while the verdict is STEP_WAIT. */
int view_commit_waiting(pyps_store *s, struct event *e, uint32_t kind, uint64_t deadline, struct outcome *out,
                        uint64_t *waited);

/* participant.c */
int participant_leave(pyps_store *s); /* pyps_leave, but the staging buffers stay mapped */

#endif
