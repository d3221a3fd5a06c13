/* push.c: a worker's step: start, stage, push; alone (a ticket of its own) or into a round.
 *
 * An staging is free when nobody has it (staging_taken), every chunk holds the ticket that it went into last
 * (complete >= staging_ticket), and no helper reads it (ticket_is_read). The marks, and who sets them:
 *
 *   handle  staging_taken   set by stage; cleared by the end of its push, and by staging_forget
 *           in_round      a push waits for a round with round_staging; until finish_round or staging_forget
 *           gathered      it waits in a round without its owner (softsync, or a push that was given up),
 *                         until forget_gathered finds that the view no longer says so
 *           staging_ticket   its last ticket: by push, finish_round, forget_gathered; at a join the view's
 *           complete      by chunks_follow; never goes back
 *   view    staged        it waits in the open round: by stage (view_round.c), until close_round
 *           staging_ticket   its last ticket, for whoever is in this slot next: by admit, close_round
 *           ticket        its owner's last, which finish_round asks for: by the same two
 */
#include <math.h>
#include <string.h>

#include "store/store.h"

uint64_t deadline_of(const pyps_store *s, double timeout_seconds) {
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
    s->claimed_at = now_nanoseconds();
    return PYPS_OK;
}

int pyps_start_ahead(pyps_store *s, pyps_claim *out) {
    int rc = store_works(s);
    if (rc) return rc;
    struct event e = event_of(s, EVENT_START_AHEAD);
    struct outcome outcome;
    enum verdict verdict;
    if ((rc = view_commit(s, &e, &outcome, &verdict))) return rc;
    *out = outcome.claim;
    return PYPS_OK;
}

/* A push that timed out in a round is waited for no longer; what it admitted stays there until that closes.
 */
void staging_forget(pyps_store *s) {
    if (s->in_round) s->gathered |= 1u << s->round_staging;
    s->in_round = false;
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++)
        s->staging_taken[staging] = s->gathered >> staging & 1;
}

/* Areas whose round has closed meanwhile, although nobody waited for that, are ordinary ones again. */
static int forget_gathered(pyps_store *s) {
    uint64_t word;
    if (!s->gathered) return PYPS_OK;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    const struct member *m = view_member(v, s->slot);
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
        if (!(s->gathered >> staging & 1) || m->staged >> staging & 1) continue;
        s->gathered &= ~(1u << staging);
        s->staging_ticket[staging] = m->staging_ticket[staging];
        s->staging_taken[staging] = false;
    }
    uint64_t version = v->version;
    view_unpin(s);
    return chunks_complete(s, version);
}

int pyps_stage(pyps_store *s, double timeout_seconds, uint32_t *staging_out) {
    int rc = store_works(s);
    if (rc) return rc;
    uint64_t deadline = deadline_of(s, timeout_seconds), since = now_nanoseconds();
    uint32_t staged = 0;
    for (;;) {
        uint32_t seen_view = view_sequence_word(s);
        if ((rc = forget_gathered(s))) return rc;
        for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
            staged += s->staging_taken[staging];
            if (s->staging_taken[staging] || s->complete < s->staging_ticket[staging]) continue;
            if (s->staging_ticket[staging] && ticket_is_read(s, s->staging_ticket[staging])) continue;
            s->staging_taken[staging] = true;
            *staging_out = staging;
            return PYPS_OK;
        }
        if (staged == s->geometry.staging_buffers && s->gathered) {
            staged = 0;
            if ((rc = wait_for_others(s, seen_view, since, 0, deadline))) return rc;
            continue;
        }
        if (staged == s->geometry.staging_buffers)
            return fail(PYPS_EINVAL, "stage: all %u staging_buffers are handed out; push one first",
                        s->geometry.staging_buffers);
        staged = 0;
        if (now_nanoseconds() >= deadline)
            return fail(PYPS_ETIMEDOUT, "stage: others still read this worker's earlier gradients");
        uint32_t seen = load32_acquire(&s->header->progress);
        word_wait(&s->header->progress, seen, STALL_NANOSECONDS);
    }
}

float *pyps_staging(pyps_store *s, uint32_t staging) {
    if (store_usable(s, true) || staging >= s->geometry.staging_buffers || s->role != PYPS_WORKER)
        return NULL;
    return staging_data(s, s->slot, staging);
}

static int check_args(const pyps_store *s, const pyps_push_args *a) {
    if (a->size != sizeof *a)
        return fail(PYPS_EINVAL, "push: size: found %u; expected %zu", a->size, sizeof *a);
    if (a->staging >= s->geometry.staging_buffers || !s->staging_taken[a->staging])
        return fail(PYPS_EINVAL, "push: staging: found %u; expected one that pyps_stage handed out",
                    a->staging);
    if (s->in_round && a->staging != s->round_staging)
        return fail(PYPS_EINVAL,
                    "push: staging: found %u; expected %u, whose round an earlier push waited for",
                    a->staging, s->round_staging);
    if (!isfinite(a->scale))
        return fail(PYPS_EINVAL, "push: scale: found %g; expected a finite number", (double)a->scale);
    if (!a->hyper)
        return fail(PYPS_EINVAL, "push: hyper: found NULL; expected one for each of %u groups",
                    s->geometry.groups);
    return PYPS_OK;
}

/* The round that this worker staged into has closed: complete its ticket, an own share of the chunks first,
 * so that N workers reduce in parallel. */
static int finish_round(pyps_store *s, uint32_t staging, pyps_push_result *out) {
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
    s->staging_ticket[staging] = ticket;
    s->staging_taken[staging] = false;
    s->in_round = false;
    return PYPS_OK;
}

static int await_round(pyps_store *s, uint32_t staging, uint64_t deadline, pyps_push_result *out) {
    uint64_t since = now_nanoseconds(), word;
    for (;;) {
        uint32_t seen = view_sequence_word(s);
        const struct view *v = view_pin(s, &word);
        if (!v) return PYPS_ECORRUPT;
        bool closed = v->round > s->round;
        view_unpin(s);
        int rc = closed ? PYPS_OK : wait_for_others(s, seen, since, 0, deadline);
        out->wait_nanoseconds = now_nanoseconds() - since;
        if (rc) return rc;
        if (closed) return finish_round(s, staging, out);
    }
}

/* The version that a round's gradient is staged after: complete in every chunk. */
static int complete_version(pyps_store *s, struct event *e) {
    uint64_t word;
    if (!s->policy->stages) return PYPS_OK;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    e->version = v->version;
    view_unpin(s);
    return chunks_complete(s, e->version);
}

/* STALE: the rank's residual is another one by now, or the policy wants to be asked again. */
static int admit_staged(pyps_store *s, struct event *e, uint64_t deadline, struct outcome *outcome,
                        pyps_push_result *out) {
    uint64_t since = now_nanoseconds();
    for (;;) {
        enum verdict verdict;
        uint32_t seen = view_sequence_word(s);
        int rc = complete_version(s, e);
        if (rc || (rc = view_commit(s, e, outcome, &verdict))) return rc;
        out->wait_nanoseconds = e->now - since;
        if (verdict != STEP_WAIT) return PYPS_OK;
        if ((rc = wait_for_others(s, seen, since, outcome->at, deadline))) return rc;
    }
}

static int admit(pyps_store *s, const pyps_push_args *args, uint64_t deadline, struct outcome *outcome,
                 pyps_push_result *out) {
    uint64_t took = args->compute_nanoseconds;
    if (!took && s->claimed_at) took = now_nanoseconds() - s->claimed_at;
    for (;;) {
        struct event e = event_of(s, EVENT_PUSH);
        e.staging = args->staging, e.samples = args->samples;
        e.base_version = args->base_version, e.compute_nanoseconds = took,
        e.grad_norm_squared = args->grad_norm_squared;
        int rc = stage_gradient(s, args, &e, out);
        FAILPOINT("push.staged");
        if (!rc) rc = admit_staged(s, &e, deadline, outcome, out);
        if (rc != STALE) return rc;
    }
}

/* Staged into a round that nobody waits for: whoever closes it completes it. */
static int gathered(pyps_store *s, const pyps_push_args *args, const struct outcome *outcome,
                    pyps_push_result *out) {
    if (args->samples) s->gathered |= 1u << args->staging;
    else s->staging_taken[args->staging] = false;
    out->samples = args->samples;
    if (!outcome->ticket) return PYPS_OK;
    out->version = s->stream_ticket = outcome->ticket;
    int rc = view_load_ticket(s, outcome->ticket);
    if (!rc) out->sources = s->source_count, out->samples = s->ticket.samples;
    if (rc < 0) return rc;
    return chunks_complete(s, outcome->ticket);
}

int pyps_push(pyps_store *s, const pyps_push_args *args, pyps_push_result *out) {
    int rc = store_works(s);
    if (rc || (rc = check_args(s, args))) return rc;
    *out = (pyps_push_result){0};
    uint64_t deadline = deadline_of(s, args->timeout_seconds);
    struct outcome outcome;
    if (s->in_round) return await_round(s, args->staging, deadline, out); /* an earlier call timed out */
    rc = admit(s, args, deadline, &outcome, out);
    if (rc == PYPS_EREJECTED) s->staging_taken[args->staging] = false; /* nobody has seen it */
    if (rc) return rc;
    FAILPOINT("push.admitted");
    out->staleness = outcome.staleness;
    if (s->policy->waits_for_round) {
        s->in_round = true, s->round = outcome.round, s->round_staging = args->staging;
        return await_round(s, args->staging, deadline, out);
    }
    if (s->policy->stages) return gathered(s, args, &outcome, out);
    s->staging_ticket[args->staging] = outcome.ticket;
    s->staging_taken[args->staging] = false;
    if (!outcome.ticket) return PYPS_OK; /* skipped */
    out->version = s->stream_ticket = outcome.ticket, out->sources = 1, out->samples = args->samples;
    return chunks_follow(s, outcome.ticket, outcome.ticket);
}

int pyps_should_continue(pyps_store *s, uint32_t done, uint32_t next, int *advice_out) {
    int rc = store_works(s);
    if (rc) return rc;
    struct event e = event_of(s, EVENT_CHECK);
    struct outcome outcome;
    enum verdict verdict;
    e.done = done, e.next = next;
    if ((rc = view_commit(s, &e, &outcome, &verdict))) return rc;
    *advice_out = outcome.advice;
    if (outcome.advice == PYPS_ABORT) staging_forget(s);
    return PYPS_OK;
}

int pyps_set_max_samples(pyps_store *s, uint32_t most) {
    int rc = store_works(s);
    if (rc) return rc;
    struct event e = event_of(s, EVENT_MAX_SAMPLES);
    struct outcome outcome;
    enum verdict verdict;
    e.next = most;
    return view_commit(s, &e, &outcome, &verdict);
}
