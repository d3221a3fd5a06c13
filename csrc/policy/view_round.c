/* view_round.c: a push gets a ticket, a place in the round, or a refusal; rounds close and open. */
#include "policy/decisions.h"

#define STEP_WINDOW   32 /* pushes over which a rank's step time is averaged: turns follow it */
#define SAMPLE_WINDOW 8  /* and its time for a sample: batches follow it */
#define LAG_WINDOW    8  /* and its lag: its pulls look so far ahead */
#define WARM_UP       2  /* steps of a worker, which allocate memory and fill caches */

/* Only whole steps of the planned batch tell what that batch costs. */
static void keep_cost(struct rank *rank, const struct event *e) {
    pyps_rank_cost *cost = &rank->cost;
    if (e->samples != rank->total.batch) return;
    uint64_t nanoseconds = e->cost_nanoseconds ? e->cost_nanoseconds : e->compute_nanoseconds;
    cost->seconds[cost->steps++ % PYPS_TIMED_STEPS] = (double)nanoseconds * 1e-9;
    policy_average(&cost->data_seconds, (double)e->data_nanoseconds * 1e-9, cost->steps, PYPS_TIMED_STEPS);
}

static void time_rank(struct view *v, const struct event *e) {
    struct member *m = view_member(v, e->slot);
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    m->steps++;
    if (rank->pushed_at) rank->interval = e->now - rank->pushed_at;
    rank->pushed_at = e->now;
    if (!e->compute_nanoseconds || !e->samples) return;
    policy_average(&rank->step_seconds, (double)e->compute_nanoseconds * 1e-9, rank->total.pushes,
                   STEP_WINDOW);
    policy_average(&rank->sample_seconds, (double)e->compute_nanoseconds * 1e-9 / e->samples,
                   rank->total.pushes, SAMPLE_WINDOW);
    if (m->steps > WARM_UP) keep_cost(rank, e);
}

/* Ends the current claim. Where rounds assign samples, the next claim starts with its round. */
static void end_claim(struct view *v, uint32_t slot, uint64_t now) {
    struct member *m = view_member(v, slot);
    m->claim_count = 0, m->claim_started = 0;
    if (!policy_find(v->policy)->assigns_rounds) view_samples_start_next(v, slot, now);
}

/* Counts the claim as done, and starts the next one if the policy allows it. */
static void finish_claim(struct view *v, const struct event *e, uint64_t staleness) {
    struct member *m = view_member(v, e->slot);
    pyps_rank *total = &view_rank(v, (uint32_t)m->rank)->total;
    if (e->samples) {
        total->pushes++, total->samples += e->samples;
        total->staleness_sum += staleness;
        if (staleness > total->staleness_max) total->staleness_max = staleness;
    } else {
        total->skipped += m->claim_count;
    }
    m->ticket = 0;
    v->outstanding--;
    end_claim(v, e->slot, e->now);
    if (!v->outstanding) v->wake_epoch++;
    view_clock_advance(v, m);
    time_rank(v, e);
}

/* Where rounds close without late gradients, the last round has those samples only: often of a single worker. */
static bool is_rest(const struct view *v) {
    const struct policy *policy = policy_find(v->policy);
    return (policy->drops_late || policy->merges_late) && !view_samples_left(v) &&
           v->staged + (uint64_t)v->policy_params.backup < v->active;
}

/* The part of a global batch that a ticket is. A round that all wait for is a whole one, but for a rest. Else a global
 * batch, the sum of the planned batches, consists of several tickets. */
static float share_of(const struct view *v, uint64_t samples) {
    uint64_t planned = 0;
    if (policy_find(v->policy)->waits_for_round && !is_rest(v)) return 1.0f;
    for (uint32_t r = 0; r < v->ranks; r++) planned += view_rank(v, r)->total.batch;
    return planned ? (float)((double)samples / (double)planned) : 1.0f;
}

/* Averaged tensors go at most all the way to the values of a ticket. */
static struct ticket weighed(struct view *v, const struct event *e, struct ticket ticket) {
    float share = share_of(v, ticket.samples);
    ticket.share = share < 1 ? share : 1;
    ticket.part = v->policy_params.scaling == PYPS_SCALE_NONE ? 1 : share;
    if (e && e->given) ticket.scale = e->scale, ticket.share = e->share, ticket.part = e->part;
    ticket.before = v->steps;
    v->steps += (double)ticket.part;
    return ticket;
}

static void measure_lag(struct view *v, struct rank *rank, uint64_t staleness) {
    uint64_t base = v->version - staleness;
    const struct ticket *then = view_ticket(v, base);  /* may have left the ring */
    double others = v->active ? (double)v->active : 1; /* a journal may say that none is there */
    double lag =
        then->number == base ? v->steps - (then->before + (double)then->part) : (double)staleness / others;
    if (rank->lags < UINT32_MAX) rank->lags++;
    bool rounds = policy_find(v->policy)->waits_for_round; /* in which a pipeline makes it the same */
    policy_average(&rank->lag, lag, rank->lags, rounds ? 1 : LAG_WINDOW);
}

double view_lookahead(const struct view *v, uint32_t slot) {
    const struct member *m = view_member(v, slot);
    const pyps_policy_params *params = &v->policy_params;
    const struct policy *policy = policy_find(v->policy);
    if (m->rank < 0 || params->plain_pulls || params->scaling == PYPS_SCALE_NONE ||
        (policy->waits_for_round && !policy->overlaps_rounds))
        return 0;
    const struct rank *rank = view_rank(v, (uint32_t)m->rank);
    if (rank->lags && rank->lags <= m->ahead) return m->ahead; /* none of its gradients was as late yet */
    return rank->lags ? rank->lag
                      : 1 - (double)share_of(v, rank->total.batch); /* each of the others pushes once */
}

static void admit(struct view *v, const struct event *e, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    finish_claim(v, e, out->staleness);
    if (!e->samples) return;
    out->ticket = ++v->version;
    *view_ticket(v, v->version) = weighed(v, e,
                                          (struct ticket){.number = v->version,
                                                          .slot = e->slot,
                                                          .staging = (uint16_t)e->staging,
                                                          .kind = TICKET_PUSH,
                                                          .samples = e->samples,
                                                          .scale = out->scale,
                                                          .tag = {e->tag[0], e->tag[1]}});
    m->ticket = m->staging_ticket[e->staging] = v->version;
}

static void commit_residual(struct view *v, uint32_t slot) {
    struct rank *rank = view_rank(v, (uint32_t)view_member(v, slot)->rank);
    rank->version_residual = rank->residual;
}

/* A worker that waits for the round has a place in it even without a gradient. */
static void stage(struct view *v, const struct event *e, const struct outcome *out) {
    bool waits = policy_find(v->policy)->waits_for_round;
    uint64_t first = view_member(v, e->slot)->claim_first;
    finish_claim(v, e, out->staleness);
    if (!e->samples && !waits) return;
    view_member(v, e->slot)->staged |= 1u << e->staging;
    view_pending(v)[v->staged++] = (struct source){.slot = e->slot,
                                                   .staging = e->staging,
                                                   .samples = e->samples,
                                                   .scale = out->scale,
                                                   .first = first,
                                                   .staleness = out->staleness};
}

static bool round_closed_without(const struct view *v, const struct member *m) {
    return policy_find(v->policy)->drops_late && !(m->claim_count && m->claim_started);
}

enum verdict view_step_gate(struct view *v, const struct event *e, struct outcome *out) {
    const struct policy *policy = policy_find(v->policy);
    enum gate_decision decision = policy->gate ? policy->gate(v, e, out) : GATE_OPEN;
    if (decision == GATE_AGAIN) out->code = TRY_AGAIN;
    return decision == GATE_AGAIN ? STEP_COMMIT : decision == GATE_WAIT ? STEP_WAIT : STEP_UNCHANGED;
}

enum verdict view_step_check(struct view *v, const struct event *e, struct outcome *out) {
    const struct policy *policy = policy_find(v->policy);
    const struct member *m = view_member(v, e->slot);
    out->advice = PYPS_CONTINUE;
    if (round_closed_without(v, m)) out->advice = PYPS_ABORT;
    else if (m->claim_count && policy->on_check) out->advice = policy->on_check(v, e);
    if (out->advice != PYPS_ABORT || !m->claim_started) return STEP_UNCHANGED;
    view_samples_return(v, e->slot, 0);
    if (view_samples_start_next(v, e->slot, e->now)) v->wake_epoch++;
    return STEP_COMMIT;
}

static enum verdict check_push(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    const struct policy *policy = policy_find(v->policy);
    if (round_closed_without(v, m))
        return step_refuse(out, fail(PYPS_EREJECTED, "the round closed without rank %d", m->rank));
    if (m->staged >> e->staging & 1 || e->samples > m->claim_count || !m->claim_count)
        return step_refuse(out, fail(PYPS_EINVAL,
                                     "samples: found %u; expected at most the %u that this worker claimed",
                                     e->samples, m->claim_count));
    /* There is one round record, so no round may close before every chunk has the last round's ticket. The
     * pusher has brought every chunk to e->version, so that must still be the last version. */
    if (policy->stages && (e->version != v->version || v->staged == v->participants)) return STEP_WAIT;
    if (e->residual && view_rank(v, (uint32_t)m->rank)->residual != e->residual_before)
        return step_refuse(out, TRY_AGAIN); /* a new worker has taken the residual's slot meanwhile */
    return view_step_gate(v, e, out);
}

enum verdict view_step_push(struct view *v, const struct event *e, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    const struct policy *policy = policy_find(v->policy);
    enum verdict verdict = check_push(v, e, out);
    if (verdict != STEP_UNCHANGED) return verdict;
    out->round = v->round;
    out->staleness =
        v->version - (e->base_version && e->base_version - 1 < m->pulled_version ? e->base_version - 1
                                                                                 : m->pulled_version);
    if (e->samples) measure_lag(v, view_rank(v, (uint32_t)m->rank), out->staleness);
    if (policy->weight) out->scale = policy->weight(v, out->staleness);
    bool taken = !policy->on_push || policy->on_push(v, e, out);
    if (out->code) return STEP_REFUSED;
    if (!taken) {
        view_samples_return(v, e->slot, 0);
        end_claim(v, e->slot, e->now);
        out->code = fail(PYPS_EREJECTED, "the policy %s refused a push with staleness %lu", policy->name,
                         out->staleness);
        return STEP_COMMIT;
    }
    if (e->samples) view_samples_return(v, e->slot, e->samples);
    if (e->residual) view_rank(v, (uint32_t)m->rank)->residual = e->residual;
    if (policy->stages) stage(v, e, out);
    else admit(v, e, out), commit_residual(v, e->slot);
    return STEP_COMMIT;
}

/* Collects the sources in rank order, not in order of arrival: summation order decides the result's bits. */
static void collect_sources(struct view *v) {
    struct source *sources = view_sources(v);
    uint32_t count = 0;
    v->round_samples = 0;
    for (uint32_t k = 0; k < v->staged; k++) {
        struct source from = view_pending(v)[k];
        if (!from.samples) continue;
        int32_t rank = view_member(v, from.slot)->rank;
        uint32_t i = count++;
        for (; i > 0 && view_member(v, sources[i - 1].slot)->rank > rank; i--) sources[i] = sources[i - 1];
        sources[i] = from;
        v->round_samples += from.samples;
    }
    v->round_sources = count;
}

static void take_back_unfinished(struct view *v) {
    for (uint32_t slot = 0; v->outstanding && slot < v->participants; slot++) {
        struct member *m = view_member(v, slot);
        if (m->state != PYPS_ACTIVE || !m->claim_count) continue;
        view_samples_return(v, slot, 0);
        m->claim_started = 0;
    }
}

static void close_round(struct view *v) {
    collect_sources(v);
    v->round++;
    v->round_ticket = v->round_sources ? ++v->version : 0;
    if (v->round_ticket)
        *view_ticket(v, v->version) = weighed(
            v, NULL,
            (struct ticket){
                .number = v->version, .kind = TICKET_ROUND, .samples = v->round_samples, .scale = 1.0f});
    for (uint32_t k = 0; k < v->staged; k++) {
        const struct source *from = &view_pending(v)[k];
        struct member *m = view_member(v, from->slot);
        m->staged &= ~(1u << from->staging);
        if (from->samples) {
            m->ticket = m->staging_ticket[from->staging] = v->round_ticket;
            m->round_samples = v->round_samples, m->round_sources = v->round_sources;
        }
        commit_residual(v, from->slot);
    }
    v->staged = 0;
    if (policy_find(v->policy)->drops_late) take_back_unfinished(v);
    v->wake_epoch++;
}

/* A worker's samples of the round that opens, or of one of the `later` rounds after it. */
static void assign(struct view *v, uint32_t slot, uint32_t later, uint64_t now) {
    const struct member *m = view_member(v, slot);
    if (m->state != PYPS_ACTIVE || (!later && (m->claim_count || view_samples_start_next(v, slot, now))))
        return;
    if (!view_takes_part(v, m)) return;
    if (!view_samples_left(v) || (later && m->ahead >= later)) return;
    if (later) view_samples_claim_ahead(v, slot);
    else view_samples_claim(v, slot, now);
}

static void assign_to_all(struct view *v, uint32_t later, uint64_t now) {
    for (uint32_t r = 0; r < v->ranks; r++)
        if (view_rank(v, r)->slot_plus_1) assign(v, view_rank(v, r)->slot_plus_1 - 1, later, now);
}

void view_assign_rounds_ahead(struct view *v) {
    uint32_t rounds = 0;
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        const struct member *m = view_member(v, slot);
        if (m->state == PYPS_ACTIVE && m->wants_ahead > rounds) rounds = m->wants_ahead;
    }
    for (uint32_t later = 1; later <= rounds; later++) assign_to_all(v, later, 0);
}

static void open_round(struct view *v, uint64_t now) {
    const struct policy *policy = policy_find(v->policy);
    if (policy->on_open && view_samples_left(v)) policy->on_open(v);
    assign_to_all(v, 0, now);
    view_assign_rounds_ahead(v);
}

void view_advance_rounds(struct view *v, uint64_t now) {
    const struct policy *policy = policy_find(v->policy);
    if (!v->all_joined) return;
    bool closes = v->staged && policy->closes(v, now);
    if (closes) close_round(v);
    bool opens = !v->outstanding || (closes && policy->merges_late); /* then late workers are computing */
    if (policy->assigns_rounds && opens && !v->staged) open_round(v, now);
}
