/* policy_bounded.c: nobody runs far ahead of the slowest.
 *
 * SSP: a worker at clock c may start if c - min clock <= bound (Ho and others: More effective distributed ML
 * via a stale synchronous parallel parameter server, NIPS 2013). Bound 0 is BSP's order.
 *
 * DSSP: past the bound the fastest may get r <= extra steps more, the r after which it is predicted to wait
 * least for the slowest's next push, by the last push and the last interval of both (Zhao and others: Dynamic
 * stale synchronous parallel distributed training for deep learning, ICDCS 2019). A grant is used up step by
 * step; when it is, and the worker is still too far ahead, it waits or is granted anew, never past bound +
 * extra.
 */
#include "policy/policy.h"

static uint64_t progress(const struct view *v) { return v->floor; }

static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    (void)now;
    return m->claim_count || (samples_left(v) && m->clock == v->floor);
}

/* How far ahead of the slowest the step would begin. The push of the one under way moves the
 * slowest on too if that is this worker alone. */
static uint64_t lead(const struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    return m->clock - v->floor + (e->kind == EVENT_START_AHEAD && !clock_alone(v, m));
}

static enum start_decision within_bound(struct view *v, const struct event *e, struct outcome *out) {
    uint64_t ahead = lead(v, e);
    if (ahead <= v->policy_params.bound || v->policy_params.bound == UINT32_MAX) return START_GO;
    out->until = v->floor + ahead - v->policy_params.bound;
    return START_WAIT;
}

static const struct rank *slowest(const struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++) {
        uint32_t slot_plus_1 = view_rank(v, r)->slot_plus_1;
        if (!slot_plus_1) continue;
        const struct member *m = view_member(v, slot_plus_1 - 1);
        if (m->state == PYPS_ACTIVE && m->clock == v->floor) return view_rank(v, r);
    }
    return NULL;
}

/* How many of at most `most` further steps leave `fast` the least wait for a push of `slow`. */
static uint32_t grant(const struct rank *fast, const struct rank *slow, uint32_t most) {
    uint32_t best = 0;
    uint64_t least = UINT64_MAX;
    for (uint32_t steps = 0; steps <= most; steps++) {
        uint64_t done = fast->pushed_at + steps * fast->interval, next = slow->pushed_at + slow->interval;
        if (next < done) next += (done - next + slow->interval - 1) / slow->interval * slow->interval;
        if (next - done >= least) continue;
        least = next - done, best = steps;
    }
    return best;
}

static enum start_decision with_extra(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    uint64_t ahead = lead(v, e), most = (uint64_t)v->policy_params.bound + v->policy_params.extra;
    if (within_bound(v, e, out) == START_GO) {
        rank->extra = 0;
        return START_GO;
    }
    if (ahead > most) return START_WAIT;
    if (!rank->extra) {
        const struct rank *slow = slowest(v);
        if (m->clock < v->ceiling || !slow || !slow->interval || !rank->interval) return START_WAIT;
        uint32_t steps = grant(rank, slow, (uint32_t)(most + 1 - ahead));
        if (!steps) return START_WAIT;
        rank->extra = steps;
    }
    rank->extra--;
    return START_GO;
}

static enum push_decision admit(struct view *v, const struct event *e, struct outcome *out) {
    (void)v, (void)e, (void)out;
    return PUSH_ADMIT;
}

static int check_dssp(const pyps_policy_params *params) {
    return policy_check_number("extra", params->extra, 0, 1e4);
}

const struct policy policy_ssp = {
    .name = "ssp", .on_start = within_bound, .on_push = admit, .holds_up = holds_up, .progress = progress};
const struct policy policy_dssp = {.name = "dssp",
                                   .check_params = check_dssp,
                                   .on_start = with_extra,
                                   .on_push = admit,
                                   .holds_up = holds_up,
                                   .progress = progress};
