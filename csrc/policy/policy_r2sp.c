/* policy_r2sp.c: R2SP, round-robin synchronous parallel (Chen, Wang, Li: INFOCOM 2019): workers update the
 * store in turn, evenly gapped, so that their transfers do not meet on its link.
 *
 * Ours: the push is gated, and the pull after it belongs to the same turn, so that between two pushes of one
 * worker every other pushes once: the staleness is N - 1 however unlike they are. The period is the slowest
 * worker's measured time from claim to gradient; the gap is period / (slack * N), counted from the last push:
 * who is late shifts all that follow, which keeps the gaps even, and gives the late one time. Who does not
 * take its turn within `patience` periods is passed over until it asks for one again.
 */
#include "policy/policy.h"

#define LEAST_PATIENCE                                                                                       \
    1e8 /* nanoseconds: an operating system may keep anybody waiting for less than that                      \
         */

static struct rank *holder(const struct view *v) { return view_rank(v, (uint32_t)(v->ring.turn % v->ranks)); }

/* Once a cycle: how long the slowest takes, and the gap that follows. */
static void measure(struct view *v) {
    double slowest = 0;
    uint32_t present = 0;
    for (uint32_t r = 0; r < v->ranks; r++) {
        const struct rank *rank = view_rank(v, r);
        if (!rank->slot_plus_1 || rank->absent) continue;
        present++;
        if (rank->step_seconds > slowest) slowest = rank->step_seconds;
    }
    v->ring.period = whole(slowest * 1e9, UINT64_MAX / 4);
    bool gaps = v->policy_params.slack > 0 && present > 1;
    v->ring.gap =
        gaps ? whole((double)v->ring.period / (v->policy_params.slack * present), UINT64_MAX / 4) : 0;
}

static void pass_on(struct view *v) {
    v->ring.turn++, v->ring.pushed = 0;
    if (v->ring.turn % v->ranks == 0) measure(v);
}

static void set_due(struct view *v) {
    const struct ring *r = &v->ring;
    uint64_t begins = r->opens > r->since ? r->opens : r->since;
    double patience = v->policy_params.patience * (double)r->period;
    if (patience < LEAST_PATIENCE) patience = LEAST_PATIENCE;
    bool known = r->period && patience < (double)v->round_timeout;
    v->next_deadline = begins + (known ? (uint64_t)patience : v->round_timeout);
}

static void taken(struct view *v, uint64_t now) {
    struct ring *r = &v->ring;
    r->opens = (r->pushed ? r->since : now) + r->gap; /* from push to push */
    pass_on(v);
    r->since = now;
    set_due(v);
}

static enum gate_decision gate(struct view *v, const struct event *e, struct outcome *out) {
    struct ring *r = &v->ring;
    struct rank *rank = view_rank(v, (uint32_t)view_member(v, e->slot)->rank);
    if (rank->absent) {
        rank->absent = 0;
        if (holder(v) == rank) r->since = e->now, set_due(v); /* or it would be late at once */
        return GATE_AGAIN;
    }
    if (holder(v) == rank && r->pushed) { /* it pushes again instead of pulling: that turn is over */
        taken(v, e->now);
        return GATE_AGAIN;
    }
    if (holder(v) != rank) {
        uint64_t mine = (uint64_t)view_member(v, e->slot)->rank, place = r->turn % v->ranks;
        out->until = r->turn + (mine > place ? mine - place : v->ranks - (place - mine));
        return GATE_WAIT;
    }
    out->until = r->turn, out->at = r->opens;
    return e->now < r->opens ? GATE_WAIT : GATE_OPEN;
}

static enum push_decision on_push(struct view *v, const struct event *e, struct outcome *out) {
    (void)out;
    if (e->samples) v->ring.pushed = 1, v->ring.since = e->now, set_due(v);
    else taken(v, e->now); /* nothing was pushed, so no pull need follow */
    return PUSH_ADMIT;
}

static void on_pull(struct view *v, const struct event *e) {
    uint32_t slot_plus_1 = holder(v)->slot_plus_1;
    if (v->ring.pushed && slot_plus_1 == e->slot + 1) taken(v, e->now);
}

static bool can_take_turn(const struct view *v, const struct rank *rank) {
    if (!rank->slot_plus_1 || rank->absent) return false;
    const struct member *m = view_member(v, rank->slot_plus_1 - 1);
    return m->state == PYPS_ACTIVE && (m->claim_count || samples_left(v));
}

static void settle(struct view *v, uint64_t now) {
    if (!v->all_joined) return;
    if (!v->next_deadline) v->ring.since = now, set_due(v);
    if (now >= v->next_deadline && can_take_turn(v, holder(v))) holder(v)->absent = 1;
    uint64_t before = v->ring.turn;
    for (uint32_t i = 0; i < v->ranks && !can_take_turn(v, holder(v)); i++) pass_on(v);
    if (v->ring.turn != before || now >= v->next_deadline) v->ring.since = now, set_due(v);
}

/* Who has not taken its turn in time; not who waits for it, its gradient ready. */
static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    (void)now;
    return m->claim_count && view_rank(v, (uint32_t)m->rank)->absent;
}

static uint64_t progress(const struct view *v) { return v->ring.turn; }

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
                                   .settle = settle,
                                   .holds_up = holds_up,
                                   .progress = progress};
