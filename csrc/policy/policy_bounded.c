/* policy_bounded.c: policies that bound how far a worker runs ahead of the slowest.
 *
 * SSP: a worker at clock c may start if c - min clock <= bound (Ho and others: More effective distributed ML
 * via a stale synchronous parallel parameter server, NIPS 2013). Bound 0 is BSP's order.
 *
 * DSSP: past the bound the fastest worker may be granted r <= extra more steps. It is the r that is predicted
 * to give the shortest wait for the slowest worker's next push, from the last push and the last interval of
 * both (Zhao and others: Dynamic stale synchronous parallel distributed training for deep learning, ICDCS
 * 2019). A grant is used up step by step. If the worker is still too far ahead after that, it waits or gets
 * another grant, never past bound + extra.
 */
#include "policy/policy.h"

/* In the first of a rank's own words. */
static uint64_t *extra_steps(const struct rank *rank) { return (uint64_t *)(uintptr_t)rank->own; }

static uint64_t progress(const struct view *v) { return v->min_clock; }

static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    (void)now;
    return m->claim_count || (view_samples_left(v) && m->clock == v->min_clock);
}

/* How many steps ahead of the slowest worker the step would start. When a worker claims ahead, the pushes
 * before that step count too: they raise the worker's clock, and with it the minimum if no other worker is
 * behind. */
static uint64_t steps_ahead(const struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    if (e->kind != EVENT_START_AHEAD) return m->clock - v->min_clock;
    uint64_t clock = m->clock + 1 + m->ahead;
    return clock - view_clock_min_after(v, m, clock);
}

static enum start_decision within_bound(struct view *v, const struct event *e, struct outcome *out) {
    uint64_t ahead = steps_ahead(v, e);
    if (ahead <= v->policy_params.bound || v->policy_params.bound == UINT32_MAX) return START_GO;
    out->until = v->min_clock + ahead - v->policy_params.bound;
    return START_WAIT;
}

static const struct rank *slowest(const struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++) {
        uint32_t slot_plus_1 = view_rank(v, r)->slot_plus_1;
        if (!slot_plus_1) continue;
        const struct member *m = view_member(v, slot_plus_1 - 1);
        if (view_takes_part(v, m) && m->clock == v->min_clock) return view_rank(v, r);
    }
    return NULL;
}

/* How many further steps, at most `max_steps`, leave `fast` the shortest wait for a push of `slow`. */
static uint32_t grant(const struct rank *fast, const struct rank *slow, uint32_t max_steps) {
    uint32_t best = 0;
    uint64_t shortest = UINT64_MAX;
    for (uint32_t steps = 0; steps <= max_steps; steps++) {
        uint64_t done = fast->pushed_at + steps * fast->interval, next = slow->pushed_at + slow->interval;
        if (next < done) next += (done - next + slow->interval - 1) / slow->interval * slow->interval;
        if (next - done >= shortest) continue;
        shortest = next - done, best = steps;
    }
    return best;
}

static enum start_decision with_extra(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    uint64_t ahead = steps_ahead(v, e), max_ahead = (uint64_t)v->policy_params.bound + v->policy_params.extra;
    if (within_bound(v, e, out) == START_GO) {
        *extra_steps(rank) = 0;
        return START_GO;
    }
    if (ahead > max_ahead) return START_WAIT;
    if (!*extra_steps(rank)) {
        const struct rank *slow = slowest(v);
        if (m->clock < v->max_clock || !slow || !slow->interval || !rank->interval) return START_WAIT;
        uint32_t steps = grant(rank, slow, (uint32_t)(max_ahead + 1 - ahead));
        if (!steps) return START_WAIT;
        *extra_steps(rank) = steps;
    }
    --*extra_steps(rank);
    return START_GO;
}

static void save_rank(const struct rank *rank, pyps_rank_state *out) {
    out->extra_steps = (uint32_t)*extra_steps(rank);
}

static void restore_rank(struct rank *rank, const pyps_rank_state *from) {
    *extra_steps(rank) = from->extra_steps;
}

static int check_dssp(const pyps_policy_params *params) {
    return policy_check_number("extra", params->extra, 0, 1e4);
}

const struct policy policy_ssp = {
    .name = "ssp", .on_start = within_bound, .holds_up = holds_up, .progress = progress};
const struct policy policy_dssp = {.name = "dssp",
                                   .check_params = check_dssp,
                                   .on_start = with_extra,
                                   .save_rank = save_rank,
                                   .restore_rank = restore_rank,
                                   .holds_up = holds_up,
                                   .progress = progress};
