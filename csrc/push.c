/* push.c: a worker's step: start, stage, push; alone (a ticket of its own) or into a round. */
#include <math.h>
#include <string.h>

#include "store.h"

static uint64_t deadline_of(const pyps_store *s, double timeout_seconds) {
    return timeout_seconds < 0 ? deadline_after((double)s->geometry.round_timeout_nanoseconds * 2e-9)
                               : deadline_after(timeout_seconds);
}

int pyps_start(pyps_store *s, double timeout_seconds, pyps_claim *out) {
    int rc = store_works(s);
    if (rc) return rc;
    struct event e = event_of(s, EVENT_START);
    struct outcome outcome;
    uint64_t waited;
    rc = view_commit_waiting(s, &e, deadline_of(s, timeout_seconds), &outcome, &waited);
    if (rc == PYPS_EEND) return fail(rc, "every sample has been handed out and accounted for");
    if (rc) return rc;
    *out = outcome.claim;
    out->wait_nanoseconds = waited;
    return PYPS_OK;
}

int pyps_stage(pyps_store *s, double timeout_seconds, uint32_t *area_out) {
    int rc = store_works(s);
    if (rc) return rc;
    uint64_t deadline = deadline_of(s, timeout_seconds);
    uint32_t staged = 0;
    for (;;) {
        for (uint32_t area = 0; area < s->geometry.areas; area++) {
            staged += s->area_staged[area];
            if (s->area_staged[area] || s->complete < s->area_ticket[area]) continue;
            if (s->area_ticket[area] && ticket_is_read(s, s->area_ticket[area])) continue;
            s->area_staged[area] = true;
            *area_out = area;
            return PYPS_OK;
        }
        if (staged == s->geometry.areas)
            return fail(PYPS_EINVAL, "stage: all %u areas are handed out; push one first", s->geometry.areas);
        staged = 0;
        if (now_nanoseconds() >= deadline)
            return fail(PYPS_ETIMEDOUT, "stage: others still read this worker's earlier gradients");
        uint32_t seen = load32_acquire(&s->header->progress);
        word_wait(&s->header->progress, seen, STALL_NANOSECONDS);
    }
}

float *pyps_staging(pyps_store *s, uint32_t area) {
    if (store_usable(s, true) || area >= s->geometry.areas || s->role != PYPS_WORKER) return NULL;
    return area_data(s, s->slot, area);
}

static int check_args(const pyps_store *s, const pyps_push_args *a) {
    if (a->size != sizeof *a)
        return fail(PYPS_EINVAL, "push: size: found %u; expected %zu", a->size, sizeof *a);
    if (a->area >= s->geometry.areas || !s->area_staged[a->area])
        return fail(PYPS_EINVAL, "push: area: found %u; expected one that pyps_stage handed out", a->area);
    if (!isfinite(a->scale))
        return fail(PYPS_EINVAL, "push: scale: found %g; expected a finite number", (double)a->scale);
    if (!a->hyper)
        return fail(PYPS_EINVAL, "push: hyper: found NULL; expected one for each of %u groups",
                    s->geometry.groups);
    return PYPS_OK;
}

/* The round that this worker staged into has closed: complete its ticket, an own share of the chunks first,
 * so that N workers reduce in parallel. */
static int finish_round(pyps_store *s, uint32_t area, pyps_push_result *out) {
    int rc = PYPS_OK;
    uint64_t word, ticket = 0;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    bool valid = view_valid(v, s->reference);
    if (valid) ticket = view_member(v, s->slot)->ticket;
    uint64_t version = v->version;
    view_unpin(s);
    if (!valid || ticket > version)
        return fail(PYPS_ECORRUPT, "ticket %llu: not admitted yet", (unsigned long long)ticket);
    out->version = s->stream_ticket = ticket;
    if (ticket && (rc = view_load_ticket(s, ticket)) == PYPS_OK) {
        out->sources = s->source_count, out->samples = s->ticket.samples;
        uint32_t share = 0, shares = s->source_count;
        for (uint32_t i = 0; i < shares; i++)
            if (s->sources[i].slot == s->slot) share = i;
        for (uint32_t chunk = share; chunk < s->geometry.chunks && rc == PYPS_OK; chunk += shares)
            rc = chunk_advance(s, chunk, ticket);
    }
    if (rc == STALE) rc = PYPS_OK; /* others have gone a round further without us: it is complete */
    if (rc == PYPS_OK) rc = chunks_complete(s, ticket);
    if (rc) return rc;
    s->area_ticket[area] = ticket;
    s->area_staged[area] = false;
    s->in_round = false;
    return PYPS_OK;
}

static int await_round(pyps_store *s, uint32_t area, uint64_t deadline, pyps_push_result *out) {
    uint64_t since = now_nanoseconds(), word;
    for (;;) {
        uint32_t seen = view_sequence_word(s);
        const struct view *v = view_pin(s, &word);
        if (!v) return PYPS_ECORRUPT;
        bool closed = v->round > s->round;
        view_unpin(s);
        int rc = closed ? PYPS_OK : wait_for_others(s, seen, since, deadline);
        out->wait_nanoseconds = now_nanoseconds() - since;
        if (rc) return rc;
        if (closed) return finish_round(s, area, out);
    }
}

/* STALE: the rank's residual is another one by now. */
static int admit_staged(pyps_store *s, struct event *e, struct outcome *outcome) {
    for (;;) {
        enum verdict verdict;
        uint64_t word;
        e->now = now_nanoseconds();
        if (s->policy->by_round) {
            const struct view *v = view_pin(s, &word);
            if (!v) return PYPS_ECORRUPT;
            e->version = v->version;
            view_unpin(s);
            int rc = chunks_complete(s, e->version);
            if (rc) return rc;
        }
        int rc = view_commit(s, e, outcome, &verdict);
        if (rc || verdict != STEP_WAIT) return rc;
    }
}

static int admit(pyps_store *s, const pyps_push_args *args, struct outcome *outcome, pyps_push_result *out) {
    for (;;) {
        struct event e = event_of(s, EVENT_PUSH);
        e.area = args->area, e.samples = args->samples;
        int rc = stage_gradient(s, args, &e, out);
        FAILPOINT("push.staged");
        if (!rc) rc = admit_staged(s, &e, outcome);
        if (rc != STALE) return rc;
    }
}

int pyps_push(pyps_store *s, const pyps_push_args *args, pyps_push_result *out) {
    int rc = store_works(s);
    if (rc || (rc = check_args(s, args))) return rc;
    *out = (pyps_push_result){0};
    uint64_t deadline = deadline_of(s, args->timeout_seconds);
    struct outcome outcome;
    if (s->in_round) return await_round(s, args->area, deadline, out); /* an earlier call timed out */
    if ((rc = admit(s, args, &outcome, out))) return rc;
    FAILPOINT("push.admitted");
    out->staleness = outcome.staleness;
    if (s->policy->by_round) {
        s->in_round = true, s->round = outcome.round;
        return await_round(s, args->area, deadline, out);
    }
    s->area_ticket[args->area] = outcome.ticket;
    s->area_staged[args->area] = false;
    if (!outcome.ticket) return PYPS_OK; /* skipped */
    out->version = s->stream_ticket = outcome.ticket, out->sources = 1, out->samples = args->samples;
    return chunks_follow(s, outcome.ticket, outcome.ticket);
}
