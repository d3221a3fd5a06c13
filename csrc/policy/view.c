/* view.c: the pure steps of membership, starting, pulling and snapshots. Ranks and re-plans are in view_ranks.c,
 * rounds and pushes in view_round.c, the assignment of samples in view_samples.c, the least clock in view_clocks.c. */
#include "policy/decisions.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static bool in_slot(uint32_t residual, uint32_t slot) {
    return residual && (residual - 1) / RESIDUALS_A_SLOT == slot;
}

static enum verdict check_rank(const struct view *v, const struct event *e, int32_t rank,
                               struct outcome *out) {
    uint32_t most = e->grows ? v->participants : v->ranks;
    if (rank < 0)
        return step_refuse(out, fail(PYPS_EFULL, "rank: all %u planned ranks have a live worker", v->ranks));
    if ((uint32_t)rank >= most)
        return step_refuse(out, fail(PYPS_EINVAL, "rank: found %d; expected 0 to %u", rank, most - 1));
    uint32_t holder = (uint32_t)rank < v->ranks ? view_rank(v, (uint32_t)rank)->slot_plus_1 : 0;
    if (!holder) return STEP_COMMIT;
    return step_refuse(
        out, fail(PYPS_EBUSY, "rank %d: held by live process %u", rank, view_member(v, holder - 1)->pid));
}

static void take_rank(struct view *v, uint32_t slot, uint32_t number, uint64_t now) {
    if (number >= v->ranks) view_ranks_add(v, number + 1, now);
    struct rank *rank = view_rank(v, number);
    rank->slot_plus_1 = slot + 1, rank->joined = 1;
    const struct policy *policy = policy_find(v->policy);
    if (policy->on_join) policy->on_join(rank);
    view_forget_cost(rank);
}

static enum verdict join(struct view *v, const struct event *e, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    if (m->state == PYPS_ACTIVE || m->state == PYPS_FENCED || m->staged)
        return step_refuse(out, fail(PYPS_EBUSY, "slot %u is still in use", e->slot));
    int32_t rank = e->rank;
    if (e->role == PYPS_WORKER) {
        for (uint32_t r = 0; rank < 0 && r < v->ranks; r++)
            if (!view_rank(v, r)->slot_plus_1) rank = (int32_t)r;
        if (check_rank(v, e, rank, out) != STEP_COMMIT) return STEP_REFUSED;
        take_rank(v, e->slot, (uint32_t)rank, e->now);
    }
    /* A worker may write where another rank's residual is in this slot, so that one is dropped. */
    for (uint32_t r = 0; e->role == PYPS_WORKER && r < v->ranks; r++) {
        struct rank *other = view_rank(v, r);
        if ((int32_t)r == rank ||
            !(in_slot(other->residual, e->slot) || in_slot(other->version_residual, e->slot)))
            continue;
        other->residual = other->version_residual = 0;
        other->total.residuals_dropped++;
    }
    struct member joined = {.id = e->id,
                            .state = PYPS_ACTIVE,
                            .role = e->role,
                            .rank = rank,
                            .pid = e->pid,
                            .clock = rank >= 0 && !v->all_joined ? view_rank(v, (uint32_t)rank)->clock : 0,
                            .last_event_at = e->now};
    memcpy(joined.staging_ticket, m->staging_ticket, sizeof joined.staging_ticket);
    *m = joined;
    view_enter(v, m);
    v->wake_epoch++;
    out->rank = rank;
    view_find_all_joined(v);
    return STEP_COMMIT;
}

static enum verdict leave(struct view *v, const struct event *e) {
    struct member *m = view_member(v, e->slot);
    if (m->id != e->id || (m->state != PYPS_ACTIVE && m->state != PYPS_FENCED)) return STEP_UNCHANGED;
    view_samples_release_all(v, e->slot);
    if (m->rank >= 0) {
        if (view_takes_part(v, m)) v->active--, view_clock_leave(v, m);
        view_rank(v, (uint32_t)m->rank)->slot_plus_1 = 0;
        view_rank(v, (uint32_t)m->rank)->clock = m->clock;
    }
    v->wake_epoch++;
    if (v->snapshot_active && v->snapshot_slot == e->slot) v->snapshot_active = 0;
    m->state = e->state;
    return STEP_COMMIT;
}

static enum verdict rejoin(struct view *v, const struct event *e) {
    struct member *m = view_member(v, e->slot);
    if (m->state == PYPS_ACTIVE) return STEP_UNCHANGED;
    m->state = PYPS_ACTIVE, m->pushed_at = 0;
    v->wake_epoch++;
    view_enter(v, m);
    return STEP_COMMIT;
}

static enum verdict start(struct view *v, const struct event *e, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    const struct policy *policy = policy_find(v->policy);
    enum verdict verdict = STEP_UNCHANGED;
    out->until = policy->assigns_rounds ? v->round + 1 : 0;
    if (!v->all_joined || (policy->waits_for_round && m->staged)) return STEP_WAIT;
    if (!m->claim_count) {
        if (!view_samples_left(v) && !v->outstanding && !v->staged) return step_refuse(out, PYPS_EEND);
        if (policy->assigns_rounds || !view_samples_left(v) || !view_takes_part(v, m)) return STEP_WAIT;
        if (policy->on_start && policy->on_start(v, e, out) == START_WAIT)
            return out->code ? STEP_REFUSED : STEP_WAIT;
        view_samples_claim(v, e->slot, e->now);
        verdict = STEP_COMMIT;
    }
    if (!m->claim_started && (policy->drops_late || policy->overlaps_rounds)) verdict = STEP_COMMIT;
    if (verdict == STEP_COMMIT) m->claim_started = 1;
    out->claim = (pyps_claim){.first = m->claim_first, .count = m->claim_count, .plan = v->plan};
    out->claim.batch = view_rank(v, (uint32_t)m->rank)->total.batch;
    out->claim.round = policy->assigns_rounds ? v->round : m->clock;
    out->claim.version = v->version;
    return verdict;
}

/* How many of its claims, the current one and those ahead, the caller has. */
static uint32_t claims_held(const struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    if (!m->claim_count) return 0;
    if (!e->after_plus_1) return m->claim_started ? 1 + m->ahead_started : 0;
    uint32_t held = 1 + m->ahead;
    while (held && view_samples_claimed(v, e->slot, held - 1).first != e->after_plus_1 - 1) held--;
    return held;
}

/* The next claim that the worker does not have yet. Never waits: a worker that cannot get one now pushes
 * first. */
static enum verdict start_ahead(struct view *v, const struct event *e, struct outcome *out) {
    struct member *m = view_member(v, e->slot);
    const struct range *ahead = view_ahead(v, e->slot);
    uint32_t held = claims_held(v, e), following = held ? held - 1 : 0;
    const struct policy *policy = policy_find(v->policy);
    if (policy->waits_for_round && !policy->overlaps_rounds)
        return step_refuse(
            out,
            fail(PYPS_EINVAL, "the policy %s waits for each step: no step can start ahead", policy->name));
    /* The worker saw that no round was open; one has opened since. */
    if (m->claim_count && !held) return start(v, e, out);
    bool changed = false;
    if (following == m->ahead && m->ahead < v->max_ahead) {
        if (m->wants_ahead <= m->ahead) m->wants_ahead = m->ahead + 1, changed = true;
        bool may = m->claim_count && view_samples_left(v) && view_takes_part(v, m);
        if (may && policy->assigns_rounds) view_assign_rounds_ahead(v), changed = true;
        else if (may && (!policy->on_start || policy->on_start(v, e, out) != START_WAIT))
            view_samples_claim_ahead(v, e->slot);
        if (out->code) return STEP_REFUSED;
    }
    out->claim = (pyps_claim){.batch = view_rank(v, (uint32_t)m->rank)->total.batch, .plan = v->plan};
    out->claim.round = 1 + following + (policy->assigns_rounds ? v->round : m->clock);
    out->claim.version = v->version;
    if (following == m->ahead) return changed ? STEP_COMMIT : STEP_UNCHANGED;
    out->claim.first = ahead[following].first, out->claim.count = (uint32_t)ahead[following].count;
    if (following < m->ahead_started) return STEP_UNCHANGED; /* it was given, and did not arrive */
    m->ahead_started = following + 1;
    return STEP_COMMIT;
}

/* The time since which this member holds others up; `now`: it does not. */
static uint64_t held_up_since(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    const struct policy *policy = policy_find(v->policy);
    if (m->state != PYPS_ACTIVE || m->rank < 0) return now;
    if (!m->claim_count && !view_takes_part(v, m)) return now;
    if (policy->holds_up ? !policy->holds_up(v, slot, now) : !m->claim_count) return now;
    return m->claim_count ? m->claim_since : m->last_event_at;
}

/* Fences live members that have kept others waiting for longer than the round timeout. */
static enum verdict tick(struct view *v, const struct event *e) {
    enum verdict verdict = v->next_deadline && e->now >= v->next_deadline ? STEP_COMMIT : STEP_UNCHANGED;
    if (e->waited < v->round_timeout) return verdict;
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        struct member *m = view_member(v, slot);
        uint64_t since = held_up_since(v, slot, e->now);
        if (since > e->now || e->now - since < v->round_timeout) continue;
        view_samples_release_all(v, slot);
        if (view_takes_part(v, m)) v->active--, view_clock_leave(v, m);
        m->state = PYPS_FENCED;
        v->wake_epoch++;
        verdict = STEP_COMMIT;
    }
    return verdict;
}

/* A state's reader comes: in it, gradients that wait for their round have not been pushed. */
static void note_saved(struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++) view_rank(v, r)->saved_pushes = view_rank(v, r)->total.pushes;
    for (uint32_t k = 0; k < v->staged; k++) {
        const struct source *from = &view_pending(v)[k];
        if (from->samples) view_rank(v, (uint32_t)view_member(v, from->slot)->rank)->saved_pushes--;
    }
}

/* One at a time. One that has lasted for the round timeout, as its reader may be stopped, ends for the next.
 */
static enum verdict snapshot_begin(struct view *v, const struct event *e, struct outcome *out) {
    out->at = v->snapshot_since + v->round_timeout;
    if (v->snapshot_active && e->now < out->at) return STEP_WAIT;
    v->snapshot++, v->snapshot_active = 1;
    v->snapshot_version = v->version, v->snapshot_slot = e->slot, v->snapshot_since = e->now;
    for (uint32_t r = 0; r < v->ranks; r++)
        view_rank(v, r)->held_residual = e->holds_residuals ? view_rank(v, r)->version_residual : 0;
    if (e->holds_residuals) note_saved(v);
    out->snapshot = v->snapshot, out->version = v->version, out->steps = v->steps;
    return STEP_COMMIT;
}

static enum verdict snapshot_end(struct view *v, const struct event *e) {
    if (!v->snapshot_active || v->snapshot != e->snapshot) return STEP_UNCHANGED;
    v->snapshot_active = 0;
    return STEP_COMMIT;
}

static enum verdict set_schedule(struct view *v, const struct event *e, struct outcome *out) {
    const struct policy *policy = policy_find(v->policy);
    if (!policy->on_schedule)
        return step_refuse(out, fail(PYPS_EINVAL, "schedule: the policy %s has no turns", policy->name));
    if (e->count != v->ranks)
        return step_refuse(
            out, fail(PYPS_EINVAL, "turns: found %u; expected one for each of %u ranks", e->count, v->ranks));
    policy->on_schedule(v, e);
    v->wake_epoch++;
    return STEP_COMMIT;
}

static enum verdict pull(struct view *v, const struct event *e) {
    struct member *m = view_member(v, e->slot);
    const struct policy *policy = policy_find(v->policy);
    if (m->pulled_version == e->version) return STEP_UNCHANGED;
    m->pulled_version = e->version;
    if (policy->on_pull) policy->on_pull(v, e);
    return STEP_COMMIT;
}

static enum verdict set_max_samples(struct view *v, const struct event *e) {
    struct rank *rank = view_rank(v, (uint32_t)view_member(v, e->slot)->rank);
    if (rank->max_samples == e->next) return STEP_UNCHANGED;
    rank->max_samples = e->next;
    return STEP_COMMIT;
}

/* Says in what a rank's data set differs from rank r's; r is the rank itself where an earlier worker of it has
 * said another one: of this run, or of the one that it goes on from. */
static int compare_data_sets(int32_t rank, const pyps_data_set *mine, uint32_t r,
                             const pyps_data_set *other) {
    char whose[64] = "this run before";
    const char *expected = "; expected the data set that the run began with";
    if (r != (uint32_t)rank) {
        snprintf(whose, sizeof whose, "rank %u", r);
        expected = "";
    }
    if (mine->length != other->length)
        return fail(PYPS_EINVAL, "data set: rank %d has %lu samples, %s has %lu%s", rank, mine->length, whose,
                    other->length, expected);
    if (mine->digest != other->digest)
        return fail(PYPS_EINVAL,
                    "data set: rank %d and %s read different types, labels or texts (digests %lx, %lx)%s",
                    rank, whose, mine->digest, other->digest, expected);
    if (!(fabs(mine->mean - other->mean) <= mine->tolerance + other->tolerance))
        return fail(PYPS_EINVAL, "data set: rank %d and %s read different values (mean %.9g, %.9g)%s", rank,
                    whose, mine->mean, other->mean, expected);
    return PYPS_OK;
}

/* Refuses a data set that differs from what any rank's worker has said, an earlier one of this rank first. */
static enum verdict set_data_set(struct view *v, const struct event *e, struct outcome *out) {
    const pyps_data_set *mine = &e->data_set;
    int32_t rank = view_member(v, e->slot)->rank;
    for (uint32_t k = 0; k <= v->ranks; k++) {
        uint32_t r = k ? k - 1 : (uint32_t)rank;
        const pyps_data_set *other = &view_rank(v, r)->data_set;
        int rc = other->size ? compare_data_sets(rank, mine, r, other) : PYPS_OK;
        if (rc) return step_refuse(out, rc);
    }
    pyps_data_set *known = &view_rank(v, (uint32_t)rank)->data_set;
    if (known->size) return STEP_UNCHANGED;
    *known = *mine;
    return STEP_COMMIT;
}

/* Events that only a worker may cause, and those that only the slot's present, unfenced member may cause. */
static bool needs_rank(enum event_kind kind) {
    return kind == EVENT_START || kind == EVENT_START_AHEAD || kind == EVENT_PULL || kind == EVENT_PUSH ||
           kind == EVENT_CHECK || kind == EVENT_MAX_SAMPLES || kind == EVENT_GATE || kind == EVENT_DATA_SET ||
           kind == EVENT_COST_MODEL;
}

static bool needs_member(enum event_kind kind) {
    return needs_rank(kind) || kind == EVENT_REJOIN || kind == EVENT_SNAPSHOT_BEGIN;
}

static int member_code(const struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    if (m->id != e->id || m->state == PYPS_LEFT || m->state == PYPS_DEAD)
        return fail(PYPS_EFENCED, "this participant was found dead at view %lu; join again", v->sequence);
    if (m->rank < 0 && needs_rank(e->kind)) return fail(PYPS_EINVAL, "slot %u: no worker is in it", e->slot);
    if (m->state == PYPS_FENCED && e->kind != EVENT_REJOIN)
        return fail(PYPS_EFENCED, "rank %d was later than the round timeout and is fenced; rejoin", m->rank);
    return PYPS_OK;
}

static enum verdict step(struct view *v, const struct event *e, struct outcome *out) {
    switch (e->kind) {
    case EVENT_JOIN:
        return join(v, e, out);
    case EVENT_LEAVE:
        return leave(v, e);
    case EVENT_REJOIN:
        return rejoin(v, e);
    case EVENT_START:
        return start(v, e, out);
    case EVENT_START_AHEAD:
        return start_ahead(v, e, out);
    case EVENT_PULL:
        return pull(v, e);
    case EVENT_PUSH:
        return view_step_push(v, e, out);
    case EVENT_TICK:
        return tick(v, e);
    case EVENT_REPLAN:
        return view_step_replan(v, e, out);
    case EVENT_SCHEDULE:
        return set_schedule(v, e, out);
    case EVENT_CHECK:
        return view_step_check(v, e, out);
    case EVENT_MAX_SAMPLES:
        return set_max_samples(v, e);
    case EVENT_GATE:
        return view_step_gate(v, e, out);
    case EVENT_SNAPSHOT_BEGIN:
        return snapshot_begin(v, e, out);
    case EVENT_SNAPSHOT_END:
    case EVENT_SNAPSHOT_CANCEL:
        return snapshot_end(v, e);
    case EVENT_DATA_SET:
        return set_data_set(v, e, out);
    case EVENT_COST_MODEL:
        return view_step_cost_model(v, e);
    case EVENT_NONE:
        break;
    }
    return STEP_UNCHANGED;
}

/* What follows from a change: rounds close and open, and the policy acts. */
static void finish_event(struct view *v, const struct event *e, struct outcome *out) {
    const struct policy *policy = policy_find(v->policy);
    uint64_t round = v->round;
    if (needs_member(e->kind)) view_member(v, e->slot)->last_event_at = e->now;
    if (policy->stages) view_advance_rounds(v, e->now);
    if (policy->after_event) policy->after_event(v, e->now);
    if (e->kind != EVENT_PUSH || !policy->stages || out->code) return;
    if (v->round != round)
        out->ticket = v->round_ticket, out->samples = v->round_samples, out->sources = v->round_sources;
    else if (policy->waits_for_round) out->until = round + 1;
}

enum verdict view_step(struct view *v, const struct event *e, struct outcome *out) {
    *out = (struct outcome){.rank = -1, .scale = 1.0f};
    if (needs_member(e->kind)) {
        int code = member_code(v, e);
        if (code) return step_refuse(out, code);
    }
    enum verdict verdict = step(v, e, out);
    if (verdict != STEP_COMMIT) return verdict;
    finish_event(v, e, out);
    v->sequence++, v->now = e->now;
    v->event_kind = e->kind, v->event_slot = e->slot, v->event_id = e->id;
    return STEP_COMMIT;
}
