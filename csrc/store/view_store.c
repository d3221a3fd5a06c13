/* view_store.c: publishes views: the hazard, the copy and the CAS. The pure steps are in policy/view.c. */
#include <stdlib.h>
#include <string.h>

#include "store/buffers.h"

#define OBSERVE_SECONDS 10.0
#define VIEW_SCANS                                                                                           \
    1000u /* two buffers are free at any moment, but other ones by the time that a scan comes there */

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

int view_version(pyps_store *s, uint64_t *version) {
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    *version = v->version;
    view_unpin(s);
    return PYPS_OK;
}

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
        return fail(PYPS_ECORRUPT, "view %lu: its counts or indices are impossible; the segment is damaged",
                    word_version(*word));
    return PYPS_OK;
}

/* No word comes twice: the view that this handle has read or published last need not be copied while its word stays. */
int view_draft(pyps_store *s, uint64_t *word) {
    *word = load_acquire(&s->header->view);
    if (s->drafted && *word == s->draft_word) return PYPS_OK;
    int rc = copy_pinned(s, s->draft, word);
    s->drafted = !rc, s->draft_word = *word;
    return rc;
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
        return fail(PYPS_ECORRUPT, "view %lu: its counts or indices are impossible; the segment is damaged",
                    word_version(word));
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

/* A buffer gets its memory when it is first needed: a participant that waits keeps one, one that stops maybe two. */
static int view_buffer_allocate(pyps_store *s, uint32_t buffer) {
    if (buffer < s->layout.views_allocated) return PYPS_OK;
    return segment_allocate(s, s->layout.views + buffer * s->layout.view_stride, s->layout.view_stride);
}

/* Into s->private_view: the lowest that is free, which was used last and so lies in cache. */
static int view_buffer_claim(pyps_store *s) {
    if (s->private_view != NONE) return PYPS_OK;
    for (uint32_t i = 0; i < VIEW_SCANS * s->layout.view_count; i++) {
        uint32_t buffer = i % s->layout.view_count;
        uint64_t owner = load_acquire(&s->view_owners[buffer]);
        if (owner_holder(owner) != HOLDER_NONE) continue;
        if (word_buffer(load_seq(&s->header->view)) == buffer) continue; /* W1 */
        if (view_has_reader(s, buffer)) continue;
        FAILPOINT("view.scanned");
        if (!cas_seq(&s->view_owners[buffer], owner,
                     owner_make(owner_generation(owner) + 1, holder_of(s), 0)))
            continue;
        int rc = view_buffer_allocate(s, buffer);
        if (rc) {
            owner_release(&s->view_owners[buffer], holder_of(s));
            return rc;
        }
        s->private_view = buffer;
        return PYPS_OK;
    }
    return fail(PYPS_EFULL, "no free view buffer among %u; the segment may be damaged", s->layout.view_count);
}

static void view_buffer_published(pyps_store *s) {
    FAILPOINT("view.unreleased");
    owner_release(&s->view_owners[s->private_view], holder_of(s));
    s->private_view = NONE;
}

int view_commit(pyps_store *s, struct event *e, struct outcome *out, enum verdict *verdict) {
    for (;;) {
        uint64_t word;
        int rc = view_buffer_claim(s);
        if (rc) return rc;
        struct view *next = s->draft;
        if ((rc = view_draft(s, &word))) return rc;
        FAILPOINT("view.copied");
        e->now = wait_now_nanoseconds(); /* after every time in that view */
        s->drafted = false;              /* until it is published */
        *verdict = view_step(next, e, out);
        if (*verdict != STEP_COMMIT) {
            journal_event(s, e, out, *verdict, next);
            return out->code;
        }
        memcpy(view_at(s, s->private_view), next, view_used_bytes(next));
        FAILPOINT("view.decided");
        uint64_t published = word_make(next->sequence, s->private_view);
        if (!cas_seq(&s->header->view, word, published)) continue;
        s->drafted = true, s->draft_word = published;
        FAILPOINT("view.committed");
        if (s->begun) memcpy(s->begun, next, view_used_bytes(next));
        journal_event(s, e, out, *verdict, next);
        view_buffer_published(s);
        if (wait_was_announced(&s->header->view_waiters, futex_word(s))) wait_wake_all(futex_word(s));
        return out->code;
    }
}

int view_commit_only(pyps_store *s, struct event *e) {
    struct outcome outcome;
    enum verdict verdict;
    return view_commit(s, e, &outcome, &verdict);
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
    if (t->kind == TICKET_PUSH) /* of a policy of rounds none is a ticket by itself */
        return !s->policy->stages && t->slot < s->geometry.max_participants &&
               t->staging < s->geometry.staging_buffers;
    if (t->kind != TICKET_ROUND || !s->source_count) return false;
    for (uint32_t i = 0; i < s->source_count; i++)
        if (s->sources[i].slot >= s->geometry.max_participants ||
            s->sources[i].staging >= s->geometry.staging_buffers)
            return false;
    return true;
}

static int load_ticket_from(pyps_store *s, const struct view *v, uint64_t number) {
    if (number > v->version)
        return fail(PYPS_ECORRUPT, "ticket %lu: not among the %lu admitted; the segment is damaged", number,
                    v->version);
    FAILPOINT("ticket.checked");
    struct ticket ticket = *(const struct ticket *)part_of_view(s, v, view_ticket(s->expected, number));
    if (ticket.number != number || (ticket.kind == TICKET_ROUND && v->round_ticket != number))
        return TRY_AGAIN;
    uint32_t sources = ticket.kind == TICKET_ROUND ? *(const volatile uint32_t *)&v->round_sources : 0;
    s->ticket.number = 0; /* until all of the new one is here */
    s->source_count = sources <= s->geometry.max_participants ? sources : 0;
    memcpy(s->sources, part_of_view(s, v, view_sources(s->expected)), s->source_count * sizeof *s->sources);
    if (!ticket_possible(s, &ticket))
        return fail(PYPS_ECORRUPT,
                    "ticket %lu: not of this policy's kind, or its staging buffer does not exist", number);
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

int snapshot_end(pyps_store *s, enum event_kind kind, uint64_t snapshot) {
    struct event e = store_event(s, kind);
    e.snapshot = snapshot;
    return view_commit_only(s, &e);
}
