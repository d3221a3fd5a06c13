/* reap.c: what a participant does about others: it waits for them, removes the dead and completes their pushes. */
#include "store/participants.h"

int member_leave(pyps_store *s, uint32_t slot, uint64_t id, uint32_t state, bool *changed) {
    struct event e = store_event(s, EVENT_LEAVE);
    struct outcome out;
    enum verdict verdict = STEP_UNCHANGED;
    e.slot = slot, e.id = id, e.state = state;
    int rc = view_commit(s, &e, &out, &verdict);
    *changed = !rc && verdict == STEP_COMMIT;
    return rc;
}

/* With the dead participant's lock held: releases what it pinned or held, of which others may be in need, and then
 * completes its admitted pushes. */
static int reclaim(pyps_store *s, uint32_t slot, uint64_t id) {
    uint64_t version;
    slot_clear(s, slot);
    FAILPOINT("reclaim.released");
    int rc = view_version(s, &version);
    if (rc || (rc = chunks_complete(s, version))) return rc;
    if (load_acquire(&s->slots[slot].id) == id) store_seq(&s->slots[slot].id, 0);
    return PYPS_OK;
}

int slot_reap_dead(pyps_store *s, uint32_t *dead_out) {
    uint32_t dead = 0;
    int rc = PYPS_OK;
    for (uint32_t slot = 0; slot < s->geometry.max_participants && !rc; slot++) {
        uint64_t id = load_acquire(&s->slots[slot].id);
        bool changed;
        if (!slot_is_dead(s, slot)) continue;
        if ((rc = member_leave(s, slot, id, PYPS_DEAD, &changed))) break;
        dead += changed;
        if (slot_lock_dead(s, slot, id)) continue;
        s->reclaims = slot;
        rc = reclaim(s, slot, id);
        s->reclaims = NONE;
        slot_unlock(s, slot);
    }
    if (dead_out) *dead_out = dead;
    return rc;
}

static uint64_t present_deadline(pyps_store *s) {
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    uint64_t next_deadline = v && v->next_deadline ? v->next_deadline : UINT64_MAX;
    view_unpin(s);
    return next_deadline;
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

struct waiting waiting_until(uint32_t kind, uint64_t deadline) {
    return (struct waiting){.kind = kind, .since = wait_now_nanoseconds(), .deadline = deadline};
}

/* Sleeps until that time. One that lasts much longer was a stop of this process, and maybe of all: it counts neither
 * as waiting nor against the deadline, or the first to wake would fence the others. */
static void sleep_until(pyps_store *s, struct waiting *w, uint32_t seen, uint64_t until) {
    uint64_t from = wait_now_nanoseconds();
    if (until <= from) return;
    activity_waits(s, w->kind, w->since);
    view_wait(s, seen, until - from);
    uint64_t now = wait_now_nanoseconds();
    activity_goes_on(s, now - from);
    if (now < until + STOP_NANOSECONDS) return;
    w->since += now - until;
    if (w->deadline < UINT64_MAX - (now - until)) w->deadline += now - until;
}

/* Reaps dead members; a tick fences those that only took too long. */
int view_wait_for_others(pyps_store *s, struct waiting *w, uint32_t seen, uint64_t at) {
    uint64_t now = wait_now_nanoseconds(), next_deadline = present_deadline(s);
    if (now >= w->deadline)
        return fail(PYPS_ETIMEDOUT, "waited %.3f s for the other workers", (double)(now - w->since) / 1e9);
    uint64_t until = earlier(earlier(now + WAIT_SLICE_NANOSECONDS, w->deadline), next_deadline);
    if (at && at <= now) return PYPS_OK; /* the time came while the event was decided */
    sleep_until(s, w, seen, at ? earlier(until, at) : until);
    int rc = store_check_interrupt();
    if (rc || view_sequence_word(s) != seen) return rc;
    now = wait_now_nanoseconds();
    if (at && now >= at && now < next_deadline) return PYPS_OK;
    rc = slot_reap_dead(s, NULL);
    now = wait_now_nanoseconds();
    if (rc || (now < next_deadline && now - w->since < s->geometry.round_timeout_nanoseconds)) return rc;
    struct event tick = store_event(s, EVENT_TICK);
    tick.waited = now - w->since;
    return view_commit_only(s, &tick);
}

int view_commit_waiting(pyps_store *s, struct event *e, uint32_t kind, uint64_t deadline, struct outcome *out,
                        uint64_t *waited) {
    struct waiting waiting = waiting_until(kind, deadline);
    for (;;) {
        enum verdict verdict;
        uint32_t seen =
            view_sequence_word(s); /* read before deciding, so that no change in between is missed */
        int rc = view_commit(s, e, out, &verdict);
        *waited = wait_now_nanoseconds() - waiting.since;
        if (rc || verdict != STEP_WAIT) return rc;
        if ((rc = view_wait_for_others(s, &waiting, seen, out->at))) return rc;
    }
}
