/* push.c: a worker's step: start, stage, push; a push gets a ticket or goes into a round.
 *
 * A staging buffer is free when the caller does not have it (taken), every chunk has the ticket that
 * it last went into (complete_version >= ticket), and no helper reads it (staging_has_reader). The
 * fields that say so, and what sets them:
 *
 *   in the handle, of own_staging and round
 *     taken             set by stage; cleared at the end of its push, and by staging_abandon
 *     round.pending     a push waits for the round with round.staging; until finish_round or staging_park
 *     parked            it waits in a round but no call waits for that round (softsync, or a push given up
 *                       by start or abandon); until release_parked finds that the view says otherwise
 *     ticket            its last ticket: by push, finish_round and release_parked; at a join from the view
 *     complete_version  by chunks_follow; never goes back
 *   in the view
 *     staged            it waits in the open round: by stage (view_round.c), until close_round
 *     staging_ticket    its last ticket, for the next participant in this slot: by admit and close_round
 *     ticket            the member's last one, which finish_round reads: by the same two
 */
#include <math.h>

#include "store/push.h"

int pyps_start(pyps_store *s, double timeout_seconds, pyps_claim *out) {
    int rc = store_check_worker(s);
    if (rc || (rc = require(out))) return rc;
    struct event e = store_event(s, EVENT_START);
    struct outcome outcome;
    uint64_t waited;
    rc = view_commit_waiting(s, &e, PYPS_WAITS_START, store_deadline(s, timeout_seconds), &outcome, &waited);
    if (rc == PYPS_EEND) return fail(rc, "every sample has been assigned and accounted for");
    if (rc) return rc;
    staging_park(s); /* had a push timed out in a round, that has closed: no step starts before */
    *out = outcome.claim;
    out->wait_nanoseconds = waited;
    s->claimed_at = wait_now_nanoseconds();
    return PYPS_OK;
}

int pyps_start_ahead(pyps_store *s, uint64_t after, pyps_claim *out) {
    int rc = store_check_worker(s);
    if (rc || (rc = require(out))) return rc;
    struct event e = store_event(s, EVENT_START_AHEAD);
    e.after_plus_1 = 1 + after;
    struct outcome outcome;
    enum verdict verdict;
    if ((rc = view_commit(s, &e, &outcome, &verdict))) return rc;
    *out = outcome.claim;
    return PYPS_OK;
}

/* Parked buffers whose round has closed become ordinary ones again. */
static int release_parked(pyps_store *s) {
    uint64_t word;
    if (!s->parked) return PYPS_OK;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    const struct member *m = pinned_member(s, v, s->slot);
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
        if (!(s->parked >> staging & 1) || m->staged >> staging & 1) continue;
        s->parked &= ~(1u << staging);
        s->own_staging[staging].ticket = m->staging_ticket[staging];
        s->own_staging[staging].taken = false;
    }
    uint64_t version = v->version;
    view_unpin(s);
    return chunks_complete(s, version);
}

/* Can this one be filled? Not while it is taken, or read by a helper. */
static int staging_is_free(pyps_store *s, uint32_t staging, bool *free_out) {
    *free_out = false;
    if (s->own_staging[staging].taken) return PYPS_OK;
    int rc = chunks_complete(s, s->own_staging[staging].ticket);
    bool read = s->own_staging[staging].ticket && staging_has_reader(s, s->own_staging[staging].ticket);
    *free_out = !rc && !read;
    return rc;
}

/* The buffer into *staging_out; NONE: none is free. */
static int find_staging(pyps_store *s, uint32_t *taken_out, uint32_t *staging_out) {
    bool is_free = false;
    *taken_out = 0, *staging_out = NONE;
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
        int rc = staging_is_free(s, staging, &is_free);
        if (rc) return rc;
        *taken_out += s->own_staging[staging].taken;
        if (!is_free) continue;
        s->own_staging[staging].taken = true;
        *staging_out = staging;
        return PYPS_OK;
    }
    return PYPS_OK;
}

/* One of those that keep this worker's staging buffers; 0: none is found any more. */
static uint64_t process_that_reads(const pyps_store *s) {
    for (uint32_t slot = 0; slot < s->geometry.max_participants; slot++) {
        uint64_t ticket = load_seq(&s->slots[slot].ticket_hazard);
        for (uint32_t staging = 0; ticket && staging < s->geometry.staging_buffers; staging++)
            if (s->own_staging[staging].ticket == ticket) return load_relaxed(&s->slots[slot].process);
    }
    return 0;
}

int pyps_stage(pyps_store *s, double timeout_seconds, uint32_t *staging_out) {
    int rc = store_check_worker(s);
    if (rc || (rc = require(staging_out))) return rc;
    struct waiting waiting = waiting_until(PYPS_WAITS_STAGING, store_deadline(s, timeout_seconds));
    for (uint32_t taken;;) {
        uint32_t seen_view = view_sequence_word(s);
        if ((rc = release_parked(s)) || (rc = find_staging(s, &taken, staging_out)) || *staging_out != NONE)
            return rc;
        if (taken == s->geometry.staging_buffers && !s->parked)
            return fail(PYPS_EINVAL, "stage: all %u staging buffers are in use; push one first", taken);
        if (taken == s->geometry.staging_buffers) {
            if ((rc = view_wait_for_others(s, &waiting, seen_view, 0))) return rc;
            continue;
        }
        if ((rc = store_check_interrupt())) return rc;
        if (wait_now_nanoseconds() >= waiting.deadline)
            return fail(
                PYPS_ETIMEDOUT,
                "stage: process %lu, which may be stopped, still reads an earlier gradient of this worker",
                process_that_reads(s));
        slots_release_dead(s);
        wait_on_word(&s->header->progress, load32_acquire(&s->header->progress), STALL_NANOSECONDS);
    }
}

static bool hyper_is_finite(const pyps_hyper *h) {
    return isfinite(h->lr) && isfinite(h->weight_decay) && isfinite(h->momentum) && isfinite(h->dampening) &&
           isfinite(h->beta1) && isfinite(h->beta2) && isfinite(h->eps) && isfinite(h->lr_decay) &&
           isfinite(h->clip) && isfinite(h->clip_norm);
}

/* Parts of a step divide by 1 - momentum, and Adam's steps by 1 - beta. */
static bool hyper_is_in_range(const pyps_hyper *h) {
    bool least = h->momentum >= 0 && h->beta1 >= 0 && h->beta2 >= 0;
    return least && h->momentum < 1 && h->beta1 < 1 && h->beta2 < 1;
}

static int check_args(const pyps_store *s, const pyps_push_args *a) {
    if (a->staging >= s->geometry.staging_buffers || !s->own_staging[a->staging].taken ||
        s->parked >> a->staging & 1)
        return fail(PYPS_EINVAL, "push: staging: found %u; expected one that pyps_stage returned",
                    a->staging);
    if (s->round.pending && a->staging != s->round.staging)
        return fail(PYPS_EINVAL,
                    "push: staging: found %u; expected %u, whose round an earlier push waited for",
                    a->staging, s->round.staging);
    if (!isfinite(a->scale))
        return fail(PYPS_EINVAL, "push: scale: found %g; expected a finite number", (double)a->scale);
    if (a->weighted > 1 || (a->weighted && !(a->weight >= 0 && isfinite(a->weight))))
        return fail(PYPS_EINVAL,
                    "push: weight: found %g, weighted %u; expected a finite number of at least 0", a->weight,
                    a->weighted);
    if (a->decided && !(isfinite(a->decided->scale) && isfinite(a->decided->share) && a->decided->part >= 0 &&
                        isfinite(a->decided->part)))
        return fail(PYPS_EINVAL,
                    "push: decided: found scale %g, share %g, part %g; expected those of a ticket",
                    (double)a->decided->scale, (double)a->decided->share, (double)a->decided->part);
    if (!a->hyper)
        return fail(PYPS_EINVAL, "push: hyper: found NULL; expected one for each of %u groups",
                    s->geometry.groups);
    for (uint32_t group = 0; group < s->geometry.groups; group++) {
        const pyps_hyper *h = &a->hyper[group];
        if (!hyper_is_finite(h))
            return fail(PYPS_EINVAL, "push: hyper[%u]: found a constant that is not finite (lr %g)", group,
                        (double)h->lr);
        if (!hyper_is_in_range(h))
            return fail(PYPS_EINVAL,
                        "push: hyper[%u]: found momentum %g, beta1 %g, beta2 %g; expected 0 to below 1",
                        group, (double)h->momentum, (double)h->beta1, (double)h->beta2);
    }
    return PYPS_OK;
}

/* The round that this worker staged into has closed: completes its ticket. Each worker starts with its own
 * part of the chunks, so that N workers reduce in parallel. */
static int finish_round(pyps_store *s, uint32_t staging, pyps_push_result *out) {
    int rc = PYPS_OK;
    uint64_t word, ticket = 0;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    const volatile struct member *m = pinned_member(s, v, s->slot);
    ticket = m->ticket;
    uint64_t version = v->version, sources = m->round_sources, samples = m->round_samples;
    view_unpin(s);
    if (ticket > version) return fail(PYPS_ECORRUPT, "ticket %lu: not admitted yet", ticket);
    out->version = s->stream.ticket = ticket;
    if (ticket) out->sources = (uint32_t)sources, out->samples = samples;
    if (ticket && (rc = view_load_ticket(s, ticket)) == PYPS_OK) {
        uint32_t part = 0, parts = s->source_count;
        for (uint32_t i = 0; i < parts; i++)
            if (s->sources[i].slot == s->slot) part = i;
        rc = chunks_advance_part(s, ticket, part, parts);
    }
    if (rc == TRY_AGAIN) rc = PYPS_OK; /* the ring has moved on: the round is complete */
    if (rc == PYPS_OK) rc = chunks_complete(s, ticket);
    if (rc) return rc;
    s->own_staging[staging].ticket = ticket;
    s->own_staging[staging].taken = false;
    s->round.pending = false;
    return falsely_looked(s, staging);
}

static int wait_for_round(pyps_store *s, uint32_t staging, uint64_t deadline, pyps_push_result *out) {
    struct waiting waiting = waiting_until(PYPS_WAITS_ROUND, deadline);
    uint64_t word;
    for (;;) {
        uint32_t seen = view_sequence_word(s);
        const struct view *v = view_pin(s, &word);
        if (!v) return PYPS_ECORRUPT;
        bool closed = v->round > s->round.number;
        view_unpin(s);
        int rc = closed ? PYPS_OK : view_wait_for_others(s, &waiting, seen, 0);
        out->wait_nanoseconds = wait_now_nanoseconds() - waiting.since;
        if (rc) return rc;
        if (closed) return finish_round(s, staging, out);
    }
}

/* Sets the version that a round's gradient is staged after, complete in every chunk. */
static int set_staged_version(pyps_store *s, struct event *e) {
    if (!s->policy->stages) return PYPS_OK;
    int rc = view_version(s, &e->version);
    return rc ? rc : chunks_complete(s, e->version);
}

/* For the turn of a push that is to come: a wait is no computing. */
static void waited_for_turn(pyps_store *s, uint64_t nanoseconds) {
    s->turn.waited += nanoseconds;
    if (s->claimed_at) s->claimed_at += nanoseconds;
}

int pyps_await_turn(pyps_store *s, double timeout_seconds) {
    int rc = store_check_worker(s);
    if (rc) return rc;
    uint64_t began = wait_now_nanoseconds(), deadline = store_deadline(s, timeout_seconds), waited;
    struct outcome outcome;
    do {
        struct event e = store_event(s, EVENT_GATE);
        rc = view_commit_waiting(s, &e, PYPS_WAITS_TURN, deadline, &outcome, &waited);
    } while (rc == TRY_AGAIN);
    uint64_t now = wait_now_nanoseconds();
    waited_for_turn(s, now - began);
    if (!rc) s->turn.opened_at = now;
    return rc;
}

/* TRY_AGAIN: the rank's residual has changed, or the policy wants to be asked again. */
static int admit_staged(pyps_store *s, struct event *e, uint64_t deadline, struct outcome *outcome,
                        pyps_push_result *out) {
    struct waiting waiting = waiting_until(PYPS_WAITS_TURN, deadline);
    for (;;) {
        enum verdict verdict;
        uint32_t seen = view_sequence_word(s);
        int rc = set_staged_version(s, e);
        e->waited = wait_now_nanoseconds() - waiting.since + s->turn.waited;
        e->sent = s->turn.opened_at ? wait_now_nanoseconds() - s->turn.opened_at : 0;
        if (rc || (rc = view_commit(s, e, outcome, &verdict))) return rc;
        out->wait_nanoseconds = e->now - waiting.since;
        if (verdict != STEP_WAIT) {
            out->admitted_nanoseconds = e->now;
            return PYPS_OK;
        }
        s->turn.opened_at = 0; /* the turn passed while the gradient travelled */
        if ((rc = view_wait_for_others(s, &waiting, seen, outcome->at))) return rc;
    }
}

static int admit(pyps_store *s, const pyps_push_args *args, uint64_t deadline, struct outcome *outcome,
                 pyps_push_result *out) {
    uint64_t compute_nanoseconds = args->compute_nanoseconds;
    if (!compute_nanoseconds && s->claimed_at) compute_nanoseconds = wait_now_nanoseconds() - s->claimed_at;
    for (;;) {
        struct event e = store_event(s, EVENT_PUSH);
        e.staging = args->staging, e.samples = args->samples;
        e.base_version = args->base_version, e.compute_nanoseconds = compute_nanoseconds,
        e.grad_norm_squared = args->grad_norm_squared, e.cost_nanoseconds = args->cost_nanoseconds;
        e.data_nanoseconds = args->data_nanoseconds;
        e.tag[0] = args->tag[0], e.tag[1] = args->tag[1];
        if (args->decided)
            e.given = 1, e.scale = args->decided->scale, e.share = args->decided->share,
            e.part = args->decided->part;
        int rc = staging_fill(s, args, &e, out);
        FAILPOINT("push.staged");
        if (!rc) rc = admit_staged(s, &e, deadline, outcome, out);
        if (rc != TRY_AGAIN) return rc;
    }
}

/* It is admitted: a participant that finds a buffer completes it. */
static int unless_full(int rc) { return rc == PYPS_EFULL ? PYPS_OK : rc; }

/* The gradient is staged into a round that no call waits for. The push that closes the round completes it. */
static int park(pyps_store *s, const pyps_push_args *args, const struct outcome *outcome,
                pyps_push_result *out) {
    if (args->samples) s->parked |= 1u << args->staging;
    else s->own_staging[args->staging].taken = false;
    out->samples = args->samples;
    if (!outcome->ticket) return PYPS_OK;
    out->version = s->stream.ticket = outcome->ticket;
    out->sources = outcome->sources, out->samples = outcome->samples;
    return unless_full(chunks_complete(s, outcome->ticket));
}

/* For pulls that look ahead. A gradient of ranges is not kept. */
static void keep_own(pyps_store *s, const pyps_push_args *args, const struct outcome *outcome) {
    s->own.ticket = args->ranges ? 0 : outcome->ticket;
    s->own.staging = args->staging;
    s->own.scale = staging_header(s, s->slot, args->staging)->scale * outcome->scale;
}

static uint64_t bytes_of_gradient(const pyps_store *s, const pyps_push_args *args) {
    uint64_t floats = 0;
    if (!args->ranges) return activity_bytes(s, args->codec);
    for (uint64_t i = 0; i < args->range_count; i++) floats += args->ranges[i].count;
    return pyps_encoded_bytes(args->codec, floats);
}

static int push(pyps_store *s, const pyps_push_args *given_args, pyps_push_result *out) {
    pyps_push_args copy;
    pyps_ticket decided;
    const pyps_push_args *args = &copy;
    int rc = store_check_worker(s);
    if (rc || (rc = require(out)) || (rc = read_struct("push", given_args, hyper, &copy)) ||
        (copy.decided && (rc = read_struct("push: decided", copy.decided, share, &decided))))
        return rc;
    if (copy.decided) copy.decided = &decided;
    if ((rc = check_args(s, args))) return rc;
    *out = (pyps_push_result){0};
    uint64_t deadline = store_deadline(s, args->timeout_seconds);
    struct outcome outcome;
    if (s->round.pending) { /* an earlier call timed out */
        *out = s->round.staged;
        return wait_for_round(s, args->staging, deadline, out);
    }
    s->own.ticket = 0;
    rc = admit(s, args, deadline, &outcome, out);
    s->turn.opened_at = 0;
    if (rc == PYPS_ETIMEDOUT || rc == PYPS_EINTR) waited_for_turn(s, out->wait_nanoseconds);
    else s->turn.waited = 0;
    if (rc == PYPS_EREJECTED)
        s->own_staging[args->staging].taken = false; /* no other participant has seen it */
    if (rc) return rc;
    FAILPOINT("push.admitted");
    if ((rc = lookahead_set(s))) return rc; /* for an exchange */
    s->claimed_at = wait_now_nanoseconds(); /* of a claim made ahead; else the next start sets it again */
    out->staleness = outcome.staleness;
    if (args->samples) activity_pushed(s, bytes_of_gradient(s, args));
    if (s->policy->waits_for_round) {
        s->round.pending = true, s->round.number = outcome.round, s->round.staging = args->staging;
        out->samples = args->samples; /* until its round has closed */
        s->round.staged = *out;
        return wait_for_round(s, args->staging, deadline, out);
    }
    if (s->policy->stages) return park(s, args, &outcome, out);
    s->own_staging[args->staging].ticket = outcome.ticket;
    s->own_staging[args->staging].taken = false;
    if (!outcome.ticket) return PYPS_OK; /* skipped */
    out->version = s->stream.ticket = outcome.ticket, out->sources = 1, out->samples = args->samples;
    keep_own(s, args, &outcome);
    rc = unless_full(chunks_follow(s, outcome.ticket, outcome.ticket));
    return rc ? rc : falsely_looked(s, args->staging);
}

int pyps_push(pyps_store *s, const pyps_push_args *args, pyps_push_result *out) {
    int rc = push(s, args, out);
    uint64_t word;
    bool counts = !rc || ((rc == PYPS_ETIMEDOUT || rc == PYPS_EINTR) && out->admitted_nanoseconds);
    const struct view *v = counts ? view_pin(s, &word) : NULL;
    if (!v) return rc;
    const volatile struct rank *rank = pinned_rank(s, v, (uint32_t)s->rank);
    out->rank_pushes = rank->total.pushes, out->saved_pushes = rank->saved_pushes;
    view_unpin(s);
    return rc;
}

int pyps_should_continue(pyps_store *s, uint32_t done, uint32_t next, int *advice_out) {
    int rc = store_check_worker(s);
    if (rc || (rc = require(advice_out))) return rc;
    struct event e = store_event(s, EVENT_CHECK);
    struct outcome outcome;
    enum verdict verdict;
    e.done = done, e.next = next;
    if ((rc = view_commit(s, &e, &outcome, &verdict))) return rc;
    *advice_out = outcome.advice;
    if (outcome.advice == PYPS_ABORT) staging_abandon(s);
    return PYPS_OK;
}

int pyps_set_max_samples(pyps_store *s, uint32_t samples) {
    int rc = store_check_worker(s);
    if (rc) return rc;
    struct event e = store_event(s, EVENT_MAX_SAMPLES);
    e.next = samples;
    return view_commit_only(s, &e);
}

int pyps_set_data_set(pyps_store *s, const pyps_data_set *given_data) {
    pyps_data_set copy, *data = &copy;
    int rc = store_check_worker(s);
    if (rc || (rc = read_struct("data_set", given_data, tolerance, data))) return rc;
    data->size = sizeof *data;
    if (!isfinite(data->mean) || !(data->tolerance >= 0) || isinf(data->tolerance))
        return fail(PYPS_EINVAL, "data_set: found mean %g, tolerance %g; expected finite numbers", data->mean,
                    data->tolerance);
    struct event e = store_event(s, EVENT_DATA_SET);
    e.data_set = *data;
    return view_commit_only(s, &e);
}

int pyps_set_cost_model(pyps_store *s, const pyps_cost_model *given_model) {
    pyps_cost_model copy, *model = &copy;
    int rc = store_check_worker(s);
    if (rc || (rc = read_struct("cost_model", given_model, least_seconds, model))) return rc;
    model->size = sizeof *model;
    const double seconds[] = {model->fixed_seconds, model->sample_seconds, model->least_seconds};
    for (size_t i = 0; i < sizeof seconds / sizeof *seconds; i++)
        if (!(fabs(seconds[i]) <= 1e9))
            return fail(PYPS_EINVAL, "cost_model: found %g; expected at most 1e9 seconds", seconds[i]);
    if (model->sample_seconds < 0 || model->least_seconds < 0)
        return fail(PYPS_EINVAL,
                    "cost_model: sample_seconds, least_seconds: found %g, %g; expected at least 0",
                    model->sample_seconds, model->least_seconds);
    struct event e = store_event(s, EVENT_COST_MODEL);
    e.cost_model = *model;
    return view_commit_only(s, &e);
}
