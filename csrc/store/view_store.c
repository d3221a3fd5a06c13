/* view_store.c: publishes views: the hazard, the copy and the CAS. The pure steps are in policy/view.c. */
#include <stdlib.h>
#include <string.h>

#include "store/store.h"

#define OBSERVE_SECONDS 10.0

static struct view *view_at(const pyps_store *s, uint32_t buffer) {
    return (struct view *)(void *)(s->base + s->layout.views + buffer * s->layout.view_stride);
}

static size_t bytes_of_view(const pyps_store *s) {
    return view_bytes(s->geometry.max_participants, s->geometry.staging_buffers);
}

struct view *view_allocate(const pyps_store *s) {
    struct view *v = malloc(bytes_of_view(s));
    if (!v) fail(PYPS_ENOSPC, "out of memory for a view of %zu bytes", bytes_of_view(s));
    return v;
}

struct event store_event(const pyps_store *s, enum event_kind kind) {
    return (struct event){.kind = kind, .slot = s->slot, .id = s->id};
}

const struct view *view_pin(pyps_store *s, uint64_t *word_out) {
    a64 *hazard = &s->slots[s->slot].view_hazard;
    for (;;) {
        uint64_t word = load_acquire(&s->header->view);
        uint32_t buffer = word_buffer(word);
        if (buffer >= s->layout.view_count) {
            fail(PYPS_ECORRUPT, "view: found buffer %u; the segment has %u", buffer, s->layout.view_count);
            return NULL;
        }
        store_seq(hazard, buffer + UINT64_C(1)); /* R1 of atomics.h */
        FAILPOINT("view.hazard");
        if (load_seq(&s->header->view) != word) continue; /* R2 */
        *word_out = word;
        return view_at(s, buffer);
    }
}

void view_unpin(pyps_store *s) { store_release(&s->slots[s->slot].view_hazard, 0); }

static int copy_pinned(pyps_store *s, struct view *out, uint64_t *word) {
    const struct view *present = view_pin(s, word);
    if (!present) return PYPS_ECORRUPT;
    size_t used = view_used_bytes(s->expected), most = bytes_of_view(s);
    memcpy(out, present, used); /* the counts, and all but ranks that came later */
    size_t rest =
        out->ranks > s->expected->ranks ? (out->ranks - s->expected->ranks) * sizeof(struct rank) : 0;
    if (rest > most - used) rest = most - used;
    memcpy((char *)out + used, (const char *)present + used, rest);
    view_unpin(s);
    if (!view_valid(out, s->expected) || out->sequence != word_version(*word))
        return fail(PYPS_ECORRUPT, "view %llu: its counts or indices are impossible; the segment is damaged",
                    (unsigned long long)word_version(*word));
    return PYPS_OK;
}

int view_copy(pyps_store *s, struct view *out) {
    uint64_t word;
    return copy_pinned(s, out, &word);
}

/* A reader without a hazard: the writer of a reused buffer has seen another word before it writes, so if the word
 * is the same after the copy as before, nothing was written meanwhile. Every load is an acquire, so the second one
 * of the word is the last. The thread sanitizer does not know this argument, and would see a load in a function of
 * its own. */
__attribute__((no_sanitize("thread"))) static bool copy_unpinned(pyps_store *s, struct view *out,
                                                                 size_t bytes, uint64_t *word) {
    *word = load_seq(&s->header->view);
    if (word_buffer(*word) >= s->layout.view_count) return true;
    const a64 *from = (const a64 *)(const void *)view_at(s, word_buffer(*word));
    for (size_t i = 0; i < bytes / sizeof *from; i++) {
        uint64_t part = atomic_load_explicit(&from[i], memory_order_acquire);
        memcpy((char *)out + i * sizeof part, &part, sizeof part);
    }
    return load_seq(&s->header->view) == *word;
}

/* A copy takes no longer than an event, which copies the view too, so it succeeds as often as events do. */
static int observe(pyps_store *s, struct view *out, size_t bytes) {
    uint64_t word, deadline = wait_deadline_after(OBSERVE_SECONDS);
    while (!copy_unpinned(s, out, bytes, &word))
        if (wait_now_nanoseconds() > deadline)
            return fail(PYPS_ETIMEDOUT, "the view changed for %g s without a pause", OBSERVE_SECONDS);
    bool whole = bytes == bytes_of_view(s);
    if (word_buffer(word) >= s->layout.view_count || out->sequence != word_version(word) ||
        (whole && !view_valid(out, s->expected)))
        return fail(PYPS_ECORRUPT, "view %llu: its counts or indices are impossible; the segment is damaged",
                    (unsigned long long)word_version(word));
    return PYPS_OK;
}

int view_observe(pyps_store *s, struct view *out) { return observe(s, out, bytes_of_view(s)); }
int view_observe_head(pyps_store *s, struct view *out) { return observe(s, out, sizeof *out); }

static a32 *futex_word(const pyps_store *s) {
    return (a32 *)(void *)&s->header->view;
} /* low half: little endian */

uint32_t view_sequence_word(const pyps_store *s) { return load32_acquire(futex_word(s)); }

void view_wait(pyps_store *s, uint32_t seen, uint64_t nanoseconds) {
    /* A waiter sets its mark, then the kernel compares the word. A committer CASes, then reads the mark. */
    wait_announce(&s->header->view_waiters, seen);
    wait_on_word(futex_word(s), seen, nanoseconds);
    FAILPOINT("wait.slept");
}

int view_commit(pyps_store *s, struct event *e, struct outcome *out, enum verdict *verdict) {
    for (;;) {
        uint64_t word;
        int rc = view_buffer_claim(s);
        if (rc) return rc;
        struct view *next = view_at(s, s->private_view);
        if ((rc = copy_pinned(s, next, &word))) return rc;
        e->now = wait_now_nanoseconds(); /* after every time in that view */
        *verdict = view_step(next, e, out);
        if (*verdict != STEP_COMMIT) {
            journal_event(s, e, out, *verdict, next);
            return out->code;
        }
        FAILPOINT("view.decided");
        if (!cas_seq(&s->header->view, word, word_make(next->sequence, s->private_view))) continue;
        FAILPOINT("view.committed");
        if (s->begun) memcpy(s->begun, next, view_used_bytes(next));
        journal_event(s, e, out, *verdict, next);
        view_buffer_published(s);
        if (wait_was_announced(&s->header->view_waiters, futex_word(s))) wait_wake_all(futex_word(s));
        return out->code;
    }
}

static uint64_t present_deadline(pyps_store *s) {
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    uint64_t next_deadline = v && v->next_deadline ? v->next_deadline : UINT64_MAX;
    view_unpin(s);
    return next_deadline;
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

static int (*interrupted)(void);

int pyps_set_interrupt(int (*check)(void)) {
    interrupted = check;
    return PYPS_OK;
}

int store_check_interrupt(void) {
    return interrupted && interrupted() ? fail(PYPS_EINTR, "interrupted") : PYPS_OK;
}

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
    struct outcome out;
    enum verdict verdict;
    return view_commit(s, &tick, &out, &verdict);
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

void store_snapshot_seen(pyps_store *s, const struct view *v) {
    s->snapshot = v->snapshot, s->snapshot_version = v->snapshot_version;
    s->snapshot_active = v->snapshot_active != 0;
}

int view_load_snapshot(pyps_store *s) {
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    store_snapshot_seen(s, v);
    view_unpin(s);
    return PYPS_OK;
}

static bool ticket_possible(const pyps_store *s, const struct ticket *t) {
    if (t->kind == TICKET_PUSH)
        return t->slot < s->geometry.max_participants && t->staging < s->geometry.staging_buffers;
    if (t->kind != TICKET_ROUND || !s->source_count) return false;
    for (uint32_t i = 0; i < s->source_count; i++)
        if (s->sources[i].slot >= s->geometry.max_participants ||
            s->sources[i].staging >= s->geometry.staging_buffers)
            return false;
    return true;
}

static int load_ticket_from(pyps_store *s, const struct view *v, uint64_t number) {
    if (number > v->version)
        return fail(PYPS_ECORRUPT, "ticket %llu: not among the %llu admitted; the segment is damaged",
                    (unsigned long long)number, (unsigned long long)v->version);
    FAILPOINT("ticket.checked");
    struct ticket ticket = *(const struct ticket *)part_of_view(s, v, view_ticket(s->expected, number));
    if (ticket.number != number || (ticket.kind == TICKET_ROUND && v->round_ticket != number))
        return TRY_AGAIN;
    uint32_t sources = ticket.kind == TICKET_ROUND ? *(const volatile uint32_t *)&v->round_sources : 0;
    s->ticket.number = 0; /* until all of the new one is here */
    s->source_count = sources <= s->geometry.max_participants ? sources : 0;
    memcpy(s->sources, part_of_view(s, v, view_sources(s->expected)), s->source_count * sizeof *s->sources);
    if (!ticket_possible(s, &ticket))
        return fail(PYPS_ECORRUPT, "ticket %llu: names a staging buffer that does not exist",
                    (unsigned long long)number);
    s->ticket = ticket;
    store_snapshot_seen(s, v);
    return PYPS_OK;
}

/* A cached ticket stays right, because tickets do not change. Its snapshot may be out of date. If that one
 * has ended, one buffer is saved for nothing. If another one has begun, its version is this ticket or a later
 * one, so it does not need the buffer that this ticket displaces. */
int view_load_ticket(pyps_store *s, uint64_t number) {
    if (s->ticket.number == number) return PYPS_OK;
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    int rc = load_ticket_from(s, v, number);
    view_unpin(s);
    return rc;
}
