/* policy_r2sp.c: R2SP, round-robin synchronous parallel (Chen, Wang, Li: INFOCOM 2019). Workers update the
 * store in turn, evenly spaced, so that their transfers do not share its link.
 *
 * This implementation: the push is gated, and the pull after it belongs to the same turn. Between two pushes
 * of one worker every other worker pushes once, so staleness is N - 1 however different the workers are. The
 * period is the slowest worker's measured time from claim to gradient. The gap is period / (slack * N),
 * counted from the last push: a late worker shifts all later turns, which keeps the gaps even and gives it
 * time to catch up. A worker that does not take its turn within `patience` periods is skipped until it asks
 * for a turn again.
 */
#include "error.h"
#include "policy/policy.h"

/* Nanoseconds; an operating system may delay any process for less than that. */
#define MIN_PATIENCE 1e8

static struct rank *rank_on_turn(const struct view *v) {
    return view_rank(v, (uint32_t)(v->round_robin.turn % v->ranks));
}

/* Once a cycle: the slowest worker's step time and the gap between turns. */
static void measure_period(struct view *v) {
    double slowest = 0;
    uint32_t present = 0;
    for (uint32_t r = 0; r < v->ranks; r++) {
        const struct rank *rank = view_rank(v, r);
        if (!rank->slot_plus_1 || rank->turn_skipped) continue;
        present++;
        if (rank->step_seconds > slowest) slowest = rank->step_seconds;
    }
    v->round_robin.period = policy_whole(slowest * 1e9, UINT64_MAX / 4);
    bool gaps = v->policy_params.slack > 0 && present > 1;
    v->round_robin.gap =
        gaps
            ? policy_whole((double)v->round_robin.period / (v->policy_params.slack * present), UINT64_MAX / 4)
            : 0;
}

static void next_turn(struct view *v) {
    v->round_robin.turn++, v->round_robin.pushed = 0;
    if (v->round_robin.turn % v->ranks == 0) measure_period(v);
}

static void set_deadline(struct view *v) {
    const struct round_robin *r = &v->round_robin;
    uint64_t begins = r->push_not_before > r->turn_since ? r->push_not_before : r->turn_since;
    double patience = v->policy_params.patience * (double)r->period;
    if (patience < MIN_PATIENCE) patience = MIN_PATIENCE;
    bool known = r->period && patience < (double)v->round_timeout;
    v->next_deadline = begins + (known ? (uint64_t)patience : v->round_timeout);
}

static void end_turn(struct view *v, uint64_t now) {
    struct round_robin *r = &v->round_robin;
    r->push_not_before = (r->pushed ? r->turn_since : now) + r->gap; /* from push to push */
    next_turn(v);
    r->turn_since = now;
    set_deadline(v);
}

static enum gate_decision gate(struct view *v, const struct event *e, struct outcome *out) {
    struct round_robin *r = &v->round_robin;
    struct rank *rank = view_rank(v, (uint32_t)view_member(v, e->slot)->rank);
    if (rank->turn_skipped) {
        rank->turn_skipped = 0;
        if (rank_on_turn(v) == rank)
            r->turn_since = e->now, set_deadline(v); /* a new deadline, or it would be late at once */
        return GATE_AGAIN;
    }
    if (rank_on_turn(v) == rank && r->pushed) { /* it pushes again without a pull: end that turn */
        end_turn(v, e->now);
        return GATE_AGAIN;
    }
    if (rank_on_turn(v) != rank) {
        uint64_t mine = (uint64_t)view_member(v, e->slot)->rank, now = r->turn % v->ranks;
        out->until = r->turn + (mine > now ? mine - now : v->ranks - (now - mine));
        return GATE_WAIT;
    }
    out->until = r->turn, out->at = r->push_not_before;
    return e->now < r->push_not_before ? GATE_WAIT : GATE_OPEN;
}

static enum push_decision on_push(struct view *v, const struct event *e, struct outcome *out) {
    (void)out;
    if (e->samples) v->round_robin.pushed = 1, v->round_robin.turn_since = e->now, set_deadline(v);
    else end_turn(v, e->now); /* nothing was pushed: do not wait for a pull */
    return PUSH_ADMIT;
}

static void on_pull(struct view *v, const struct event *e) {
    uint32_t slot_plus_1 = rank_on_turn(v)->slot_plus_1;
    if (v->round_robin.pushed && slot_plus_1 == e->slot + 1) end_turn(v, e->now);
}

static bool can_take_turn(const struct view *v, const struct rank *rank) {
    if (!rank->slot_plus_1 || rank->turn_skipped) return false;
    const struct member *m = view_member(v, rank->slot_plus_1 - 1);
    return m->state == PYPS_ACTIVE && (m->claim_count || view_samples_left(v));
}

static void after_event(struct view *v, uint64_t now) {
    if (!v->all_joined) return;
    if (!v->next_deadline) v->round_robin.turn_since = now, set_deadline(v);
    if (now >= v->next_deadline && can_take_turn(v, rank_on_turn(v))) rank_on_turn(v)->turn_skipped = 1;
    uint64_t before = v->round_robin.turn;
    for (uint32_t i = 0; i < v->ranks && !can_take_turn(v, rank_on_turn(v)); i++) next_turn(v);
    if (v->round_robin.turn != before || now >= v->next_deadline)
        v->round_robin.turn_since = now, set_deadline(v);
}

/* A worker that missed its turn; not one whose gradient is ready and that waits for its turn. */
static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    (void)now;
    return m->claim_count && view_rank(v, (uint32_t)m->rank)->turn_skipped;
}

static uint64_t progress(const struct view *v) { return v->round_robin.turn; }

/* As if the worker whose turn it is had pulled. Its times are set anew when all have joined. */
static void detach(struct view *v) {
    struct round_robin *r = &v->round_robin;
    if (r->pushed) next_turn(v);
    r->turn_since = r->push_not_before = 0;
}

static int check_state(const struct view *v) {
    const struct round_robin *r = &v->round_robin;
    if (!r->turn_since && !r->push_not_before && !r->pushed && r->period <= UINT64_MAX / 4 &&
        r->gap <= UINT64_MAX / 4)
        return PYPS_OK;
    return fail(PYPS_EINVAL,
                "state: policy_state: found period %llu, gap %llu and a turn under way; expected "
                "at most 2^62 nanoseconds each, and none",
                (unsigned long long)r->period, (unsigned long long)r->gap);
}

static int check_params(const pyps_policy_params *params) {
    int rc = policy_check_number("slack", params->slack, 0, 1e6);
    return rc ? rc : policy_check_number("patience", params->patience, 0.1, 1e6);
}

const struct policy policy_r2sp = {.name = "r2sp",
                                   .uses_turns = true,
                                   .check_params = check_params,
                                   .gate = gate,
                                   .on_push = on_push,
                                   .on_pull = on_pull,
                                   .after_event = after_event,
                                   .detach = detach,
                                   .check_state = check_state,
                                   .holds_up = holds_up,
                                   .progress = progress};
