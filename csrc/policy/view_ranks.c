/* view_ranks.c: the ranks of a store, and what is planned for each.
 *
 * A rank with samples takes part. One without rests: its worker waits, and holds no other up. It gets samples, or
 * loses them, by a re-plan. Ranks may be added while the store trains, up to its participants; they rest at first.
 */
#include "policy/decisions.h"

void view_enter(struct view *v, struct member *m) {
    if (!view_takes_part(v, m)) return;
    v->active++;
    view_clock_enter(v, m);
}

static struct rank *add_rank(struct view *v, const struct policy *policy) {
    uint32_t number = v->ranks++;
    struct rank *rank = view_rank(v, number);
    *rank = (struct rank){0};
    if (policy->on_new_rank) policy->on_new_rank(rank, number);
    return rank;
}

void view_init(struct view *v, const struct view_config *c) {
    view_clear(v, c);
    v->policy = c->policy, v->policy_params = c->policy_params;
    v->limit = c->samples, v->round_timeout = c->round_timeout;
    for (uint32_t slot = 0; slot < v->participants; slot++) view_member(v, slot)->rank = -1;
    while (v->ranks < c->ranks) {
        uint32_t batch = c->batches[v->ranks];
        add_rank(v, policy_find(v->policy))->total.batch = batch;
    }
}

/* Ranks that nothing was planned for: they rest until a re-plan gives them samples. */
void view_ranks_add(struct view *v, uint32_t ranks, uint64_t now) {
    const struct policy *policy = policy_find(v->policy);
    if (policy->on_grow) policy->on_grow(v, ranks, now);
    while (v->ranks < ranks) add_rank(v, policy);
}

pyps_rank_cost view_cost(const struct rank *rank) {
    pyps_rank_cost cost = rank->cost;
    cost.sample_seconds = rank->sample_seconds;
    return cost;
}

void view_forget_cost(struct rank *rank) { rank->cost.steps = 0, rank->cost.data_seconds = 0; }

void view_find_all_joined(struct view *v) {
    if (v->all_joined) return;
    v->all_joined = 1;
    for (uint32_t r = 0; r < v->ranks; r++)
        v->all_joined &= view_rank(v, r)->joined || !view_rank(v, r)->total.batch;
    if (v->all_joined) view_clock_find_min(v);
}

/* A rank without samples leaves those that others wait for, once it has pushed what it holds; one that gets some
 * again comes back. */
static void set_batch(struct view *v, struct rank *rank, uint32_t batch) {
    struct member *m = rank->slot_plus_1 ? view_member(v, rank->slot_plus_1 - 1) : NULL;
    bool before = m && view_takes_part(v, m);
    rank->total.batch = batch;
    view_forget_cost(rank);
    if (before && !batch) v->active--, view_clock_leave(v, m);
    if (m && !before) view_enter(v, m);
}

enum verdict view_step_replan(struct view *v, const struct event *e, struct outcome *out) {
    const struct policy *policy = policy_find(v->policy);
    bool changed = false;
    if (e->count != v->ranks)
        return step_refuse(out, fail(PYPS_EINVAL, "batches: found %u; expected one for each of %u ranks",
                                     e->count, v->ranks));
    if (e->plan_plus_1 && e->plan_plus_1 - 1 != v->plan)
        return step_refuse(
            out, fail(PYPS_EPLAN, "plan: found %lu; the store's is %lu", e->plan_plus_1 - 1, v->plan));
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (rank->total.batch == e->batches[r]) continue;
        set_batch(v, rank, e->batches[r]);
        changed = true;
    }
    if (changed && policy->on_replan) policy->on_replan(v);
    if (changed) v->wake_epoch++;
    v->plan++;
    view_find_all_joined(v);
    return STEP_COMMIT;
}

enum verdict view_step_cost_model(struct view *v, const struct event *e) {
    view_rank(v, (uint32_t)view_member(v, e->slot)->rank)->cost.model = e->cost_model;
    return STEP_COMMIT;
}
