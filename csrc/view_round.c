/* view_round.c: what a ready gradient leads to: a ticket of its own, a place in the round, or a refusal; and
 * when a round closes and opens. */
#include "error.h"
#include "policy.h"
#include "view.h"

static void claim_done(struct view *v, struct member *m, uint32_t area, uint64_t ticket) {
    m->claim_count = 0, m->staged = 0, m->ticket = ticket;
    if (ticket) m->area_ticket[area] = ticket;
    m->clock++;
    v->outstanding--;
}

static void count_push(struct view *v, const struct member *m, uint32_t samples, uint64_t staleness) {
    pyps_rank *total = &view_rank(v, (uint32_t)m->rank)->total;
    total->pushes++;
    total->samples += samples;
    total->staleness_sum += staleness;
    if (staleness > total->staleness_max) total->staleness_max = staleness;
}

static void skip(struct view *v, struct member *m) {
    view_rank(v, (uint32_t)m->rank)->total.skipped += m->claim_count;
    claim_done(v, m, 0, 0);
}

static void admit(struct view *v, const struct event *e, float scale, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    out->staleness = v->version - m->pulled;
    out->ticket = ++v->version;
    *view_ticket(v, v->version) = (struct ticket){.number = v->version,
                                                  .slot = e->slot,
                                                  .area = (uint16_t)e->area,
                                                  .kind = TICKET_PUSH,
                                                  .samples = e->samples,
                                                  .scale = scale};
    count_push(v, m, e->samples, out->staleness);
    claim_done(v, m, e->area, v->version);
}

enum verdict push_step(struct view *v, const struct event *e, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    const struct policy *policy = policy_find(v->policy);
    if (m->staged || e->samples > m->claim_count || !m->claim_count) {
        out->code = fail(PYPS_EINVAL, "samples: found %u; expected at most the %u that this worker claimed",
                         e->samples, m->staged ? 0 : m->claim_count);
        return STEP_REFUSED;
    }
    /* One round record is enough because no round closes before every chunk holds the last one's ticket: the
     * pusher has completed version e->version, so that must still be the last. */
    if (policy->by_round && e->version != v->version) return STEP_WAIT;
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    if (e->residual && rank->residual != e->residual_before) { /* a newcomer has taken its slot meanwhile */
        out->code = STALE;
        return STEP_REFUSED;
    }
    out->round = v->round;
    float scale = 1.0f;
    enum push_decision decision = policy->on_push(v, e->slot, &scale);
    if (decision == PUSH_REJECT) {
        samples_return(v, e->slot, 0);
        out->code = fail(PYPS_EREJECTED, "the policy %s refused a push with staleness %llu", policy->name,
                         (unsigned long long)(v->version - m->pulled));
        return STEP_COMMIT;
    }
    if (e->samples) samples_return(v, e->slot, e->samples);
    if (e->residual) rank->residual = e->residual;
    if (decision == PUSH_STAGE) {
        m->staged = 1, m->staged_area = e->area, m->staged_samples = e->samples;
    } else if (!e->samples) {
        skip(v, m);
    } else {
        admit(v, e, scale, out);
    }
    return STEP_COMMIT;
}

/* Sources in rank order, whoever came first: the order of summation, hence the bits of the result. */
static void gather(struct view *v) {
    struct source *sources = view_sources(v);
    uint32_t count = 0;
    v->round_samples = 0;
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        struct member *m = view_member(v, slot);
        if (!m->staged) continue;
        if (!m->staged_samples) {
            skip(v, m);
            continue;
        }
        uint32_t i = count++;
        for (; i > 0 && view_member(v, sources[i - 1].slot)->rank > m->rank; i--) sources[i] = sources[i - 1];
        sources[i] = (struct source){.slot = slot, .area = m->staged_area, .samples = m->staged_samples};
        v->round_samples += m->staged_samples;
    }
    v->round_sources = count;
}

static void close_round(struct view *v) {
    gather(v);
    v->round++;
    v->round_ticket = 0;
    if (!v->round_sources) return;
    v->round_ticket = ++v->version;
    *view_ticket(v, v->version) = (struct ticket){
        .number = v->version, .kind = TICKET_ROUND, .samples = v->round_samples, .scale = 1.0f};
    for (uint32_t i = 0; i < v->round_sources; i++) {
        struct member *m = view_member(v, view_sources(v)[i].slot);
        count_push(v, m, m->staged_samples, 0);
        claim_done(v, m, m->staged_area, v->version);
    }
}

void round_settle(struct view *v, uint64_t now) {
    const struct policy *policy = policy_find(v->policy);
    if (!policy->by_round || !v->opened) return;
    bool closed = policy->on_event(v);
    if (closed) close_round(v);
    if (!closed && v->outstanding) return;
    for (uint32_t r = 0; r < v->ranks && samples_left(v); r++) {
        uint32_t slot_plus_1 = view_rank(v, r)->slot_plus_1;
        if (!slot_plus_1) continue;
        struct member *m = view_member(v, slot_plus_1 - 1);
        if (m->state == PYPS_ACTIVE && !m->claim_count) samples_take(v, slot_plus_1 - 1, now);
    }
}
