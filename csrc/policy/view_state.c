/* view_state.c: what a state keeps of a view, and a view made from it. A state has neither members nor times:
 * the samples that members hold are to be assigned again, and gradients that wait for their round have not
 * been pushed.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/runs.h"

#define MAX_COUNT (UINT64_C(1) << 62)
#define MAX_STEPS (UINT64_C(1) << 39) /* also of versions: a chunk's word has 40 bits for one */

/* A range of samples to assign, its place in the order in which the ranges were assigned, and whether it may become
 * one with the ranges before and after it. */
struct piece {
    pyps_range range;
    uint32_t order;
    bool joins_before, joins_after;
};

uint32_t view_state_ranges(const struct view *v) {
    return v->ranges + v->participants * (v->staging_buffers + 1 + v->max_ahead);
}

static void add_piece(struct piece *pieces, uint32_t *count, uint64_t first, uint64_t samples) {
    if (!samples) return;
    pieces[*count] = (struct piece){{first, samples}, *count, false, false};
    ++*count;
}

/* Of a rank's whole batch: from one longer range the rank would claim the same samples. */
static void add_claim(const struct view *v, uint32_t rank, struct piece *pieces, uint32_t *count,
                      struct range claim) {
    const struct rank *r = view_rank(v, rank);
    if (!claim.count) return;
    add_piece(pieces, count, claim.first, claim.count);
    pieces[*count - 1].joins_before = true;
    pieces[*count - 1].joins_after = claim.count == (r->next_batch ? r->next_batch : r->total.batch);
}

/* In rank order, as rounds assign them; what was given back comes last. A claim ends where a range does, so ranges
 * that were given back stay as they are. */
static uint32_t gather_pieces(const struct view *v, struct piece *pieces) {
    uint32_t count = 0;
    for (uint32_t claim = 0; claim <= v->max_ahead; claim++)
        for (uint32_t r = 0; r < v->ranks; r++) {
            for (uint32_t k = 0; !claim && k < v->staged; k++) {
                const struct source *from = &view_pending(v)[k];
                if (view_member(v, from->slot)->rank == (int32_t)r)
                    add_claim(v, r, pieces, &count, (struct range){from->first, from->samples});
            }
            uint32_t slot_plus_1 = view_rank(v, r)->slot_plus_1;
            if (!slot_plus_1) continue;
            add_claim(v, r, pieces, &count, view_samples_claimed(v, slot_plus_1 - 1, claim));
        }
    for (uint32_t i = 0; i < v->returned; i++)
        add_piece(pieces, &count, view_ranges(v)[i].first, view_ranges(v)[i].count);
    return count;
}

static int by_first(const void *left, const void *right) {
    const struct piece *a = left, *b = right;
    return a->range.first < b->range.first ? -1 : a->range.first > b->range.first;
}

static int by_order(const void *left, const void *right) {
    const struct piece *a = left, *b = right;
    return a->order < b->order ? -1 : a->order > b->order;
}

/* Neighbours become one range where they may, or must so that there are no more than `most`; and one that ends at
 * *cursor becomes part of what was never assigned. A claim never leaves one sample of a range, so a claim of one stays
 * a range. Leaves the ranges in their first order. */
static uint32_t merge_pieces(struct piece *pieces, uint32_t count, uint64_t *cursor, uint32_t most) {
    bool all = count > most;
    uint32_t merged = 0;
    qsort(pieces, count, sizeof *pieces, by_first);
    for (uint32_t i = 0; i < count; i++) {
        struct piece *last = merged ? &pieces[merged - 1] : NULL;
        bool same = last && last->joins_after && pieces[i].joins_before && pieces[i].range.count > 1;
        bool joins = last && (all || same);
        if (!joins || last->range.first + last->range.count != pieces[i].range.first) {
            pieces[merged++] = pieces[i];
            continue;
        }
        last->range.count += pieces[i].range.count;
        last->joins_after = pieces[i].joins_after;
        if (pieces[i].order < last->order) last->order = pieces[i].order;
    }
    const struct piece *end = merged ? &pieces[merged - 1] : NULL;
    if (end && (all || end->joins_after) && end->range.first + end->range.count == *cursor)
        *cursor = pieces[--merged].range.first;
    qsort(pieces, merged, sizeof *pieces, by_order);
    return merged;
}

/* A gradient that waits for its round was counted when it came. */
static void uncount_staged(const struct view *v, uint32_t rank, pyps_rank_state *out) {
    for (uint32_t k = 0; k < v->staged; k++) {
        const struct source *from = &view_pending(v)[k];
        if (view_member(v, from->slot)->rank != (int32_t)rank || !from->samples) continue;
        out->clock -= out->clock > 0;
        out->total.pushes--, out->total.samples -= from->samples;
        out->total.staleness_sum -= from->staleness;
    }
}

static void capture_rank(const struct view *v, uint32_t r, pyps_rank_state *out) {
    const struct rank *rank = view_rank(v, r);
    memset(out, 0, sizeof *out);
    out->total = rank->total;
    out->clock = rank->clock;
    if (rank->slot_plus_1) out->clock = view_member(v, rank->slot_plus_1 - 1)->clock;
    out->interval = rank->interval;
    out->step_seconds = rank->step_seconds, out->sample_seconds = rank->sample_seconds;
    out->lag = rank->lag, out->lags = rank->lags;
    out->next_batch = rank->next_batch, out->max_samples = rank->max_samples;
    out->has_residual = rank->version_residual != 0;
    out->data_set = rank->data_set;
    if (policy_find(v->policy)->save_rank) policy_find(v->policy)->save_rank(rank, out);
    uncount_staged(v, r, out);
}

static void clocks_without_staged(const struct view *v, const pyps_rank_state *ranks, pyps_state *out) {
    out->fastest = 0;
    for (uint32_t r = 0; r < v->ranks; r++) {
        if (ranks[r].clock > out->fastest) out->fastest = ranks[r].clock;
        if (view_rank(v, r)->slot_plus_1 && ranks[r].clock < out->slowest) out->slowest = ranks[r].clock;
    }
    if (out->fastest < out->slowest) out->fastest = out->slowest;
}

int view_capture(struct view *v, pyps_state *out, pyps_rank_state *ranks, pyps_range *ranges) {
    struct piece *pieces = malloc(view_state_ranges(v) * sizeof *pieces);
    if (!pieces) return fail(PYPS_ENOSPC, "out of memory for %u ranges of samples", view_state_ranges(v));
    const struct policy *policy = policy_find(v->policy);
    if (policy->detach) policy->detach(v);
    uint64_t cursor = v->cursor;
    uint32_t count = merge_pieces(pieces, gather_pieces(v, pieces), &cursor, v->ranges);
    for (uint32_t i = 0; i < count; i++) ranges[i] = pieces[i].range;
    free(pieces);
    for (uint32_t r = 0; r < v->ranks; r++) capture_rank(v, r, &ranks[r]);
    memset(out, 0, sizeof *out);
    out->slowest = v->min_clock, out->fastest = v->max_clock;
    if (v->staged) clocks_without_staged(v, ranks, out);
    out->size = sizeof *out;
    out->policy = v->policy, out->ranks = v->ranks, out->ranges = count;
    out->version = v->version, out->round = v->round, out->plan = v->plan;
    out->samples_assigned = cursor, out->samples_dropped = v->samples_dropped;
    memcpy(out->policy_state, v->shared_state, sizeof out->policy_state);
    out->policy_params = v->policy_params, out->samples = v->limit == UINT64_MAX ? 0 : v->limit;
    out->rank = ranks, out->range = ranges;
    return PYPS_OK;
}

/* ---- restore ---- */

static int check_counts(const struct view *v, const pyps_state *state) {
    uint64_t end = v->limit < MAX_COUNT ? v->limit : MAX_COUNT;
    const struct {
        const char *field;
        uint64_t found, most;
    } fields[] = {
        {"state: version", state->version, MAX_STEPS},
        {"state: round", state->round, MAX_COUNT},
        {"state: plan", state->plan, MAX_COUNT},
        {"state: samples_assigned", state->samples_assigned, end},
        {"state: samples_dropped", state->samples_dropped, state->samples_assigned},
        {"state: fastest", state->fastest, MAX_COUNT},
        {"state: slowest", state->slowest, state->fastest},
        {"state: ranks", state->ranks, UINT16_MAX},
        {"state: ranges", state->ranges, v->ranges},
    };
    int rc = PYPS_OK;
    for (size_t i = 0; i < sizeof fields / sizeof *fields && !rc; i++)
        rc = pyps__between(fields[i].field, fields[i].found, 0, fields[i].most);
    if (!rc && ((state->ranks && !state->rank) || (state->ranges && !state->range)))
        rc = fail(PYPS_EINVAL, "state: rank, range: found NULL; expected %u and %u of them", state->ranks,
                  state->ranges);
    return rc;
}

static int check_ranges(const pyps_state *state, struct piece *sorted) {
    for (uint32_t i = 0; i < state->ranges; i++) sorted[i] = (struct piece){state->range[i], i, false, false};
    qsort(sorted, state->ranges, sizeof *sorted, by_first);
    uint64_t end = 0;
    for (uint32_t i = 0; i < state->ranges; i++) {
        const pyps_range *r = &sorted[i].range;
        if (r->first < end || !r->count || r->first > state->samples_assigned ||
            r->count > state->samples_assigned - r->first)
            return fail(PYPS_EINVAL,
                        "state: range[%u]: found %lu samples from %lu; expected at least 1, of no other "
                        "range, before %lu",
                        sorted[i].order, r->count, r->first, state->samples_assigned);
        end = r->first + r->count;
    }
    return PYPS_OK;
}

static int check_rank(const pyps_state *state, uint32_t r) {
    const pyps_rank_state *rank = &state->rank[r];
    const double times[] = {rank->step_seconds, rank->sample_seconds, rank->staleness_per_sample, rank->lag};
    const uint64_t counts[] = {rank->total.pushes,
                               rank->total.samples,
                               rank->total.skipped,
                               rank->total.returned,
                               rank->total.staleness_sum,
                               rank->total.staleness_max,
                               rank->total.residuals_dropped,
                               rank->interval,
                               rank->turn_gap};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++)
        if (!(times[i] >= 0 && times[i] <= 1e18))
            return fail(PYPS_EINVAL, "state: rank %u: found an average of %g; expected 0 to 1e18", r,
                        times[i]);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (counts[i] > MAX_COUNT)
            return fail(PYPS_EINVAL, "state: rank %u: found a count of %lu; expected at most 2^62", r,
                        counts[i]);
    if (rank->clock > state->fastest)
        return fail(PYPS_EINVAL, "state: rank %u: clock: found %lu; expected at most %lu, the fastest's", r,
                    rank->clock, state->fastest);
    const pyps_data_set *data = &rank->data_set;
    if (data->size && (data->size != sizeof *data || !isfinite(data->mean) || !(data->tolerance >= 0) ||
                       isinf(data->tolerance)))
        return fail(PYPS_EINVAL,
                    "state: rank %u: data_set: found size %u, mean %g, tolerance %g; expected 0 or %zu, and "
                    "finite numbers",
                    r, data->size, data->mean, data->tolerance, sizeof *data);
    if (rank->lags > UINT32_MAX)
        return fail(PYPS_EINVAL, "state: rank %u: lags: found %lu; expected below 2^32", r, rank->lags);
    if (rank->next_batch > INT32_MAX || rank->has_residual > 1)
        return fail(PYPS_EINVAL,
                    "state: rank %u: next_batch, has_residual: found %u, %u; expected below 2^31, 0 or 1", r,
                    rank->next_batch, rank->has_residual);
    return PYPS_OK;
}

static void restore_rank(struct rank *rank, const pyps_rank_state *from, const struct policy *policy,
                         bool same_policy) {
    uint32_t batch = rank->total.batch;
    rank->total = from->total;
    rank->total.batch = batch, rank->total.reserved = 0;
    rank->saved_pushes = from->total.pushes;
    rank->clock = from->clock, rank->interval = from->interval;
    rank->step_seconds = from->step_seconds, rank->sample_seconds = from->sample_seconds;
    rank->max_samples = from->max_samples;
    rank->data_set = from->data_set;
    rank->lag = from->lag, rank->lags = (uint32_t)from->lags;
    if (!same_policy) return;
    rank->next_batch = from->next_batch;
    if (policy->restore_rank) policy->restore_rank(rank, from);
}

static int check_state(const struct view *v, const pyps_state *state) {
    int rc = check_counts(v, state);
    if (rc) return rc;
    struct piece *sorted = malloc((state->ranges + 1) * sizeof *sorted);
    if (!sorted) return fail(PYPS_ENOSPC, "out of memory for %u ranges of samples", state->ranges);
    rc = check_ranges(state, sorted);
    free(sorted);
    for (uint32_t r = 0; r < state->ranks && !rc; r++) rc = check_rank(state, r);
    return rc;
}

/* By the first tensor: as a rule all have taken the same steps. */
static double steps_taken(const pyps_state *state) {
    return state->steps && isfinite(state->steps[0]) ? state->steps[0] : 0;
}

int view_restore(struct view *v, const pyps_state *state) {
    int rc = check_state(v, state);
    if (rc) return rc;
    const struct policy *policy = policy_find(v->policy);
    bool same_policy = state->policy == v->policy;
    v->version = state->version, v->round = state->round, v->plan = state->plan;
    v->cursor = state->samples_assigned, v->samples_dropped = state->samples_dropped;
    v->steps = steps_taken(state);
    *view_ticket(v, v->version) =
        (struct ticket){.number = v->version, .before = v->steps}; /* lags count from it */
    v->min_clock = state->slowest, v->max_clock = state->fastest;
    v->returned = state->ranges;
    for (uint32_t i = 0; i < state->ranges; i++)
        view_ranges(v)[i] = (struct range){state->range[i].first, state->range[i].count};
    for (uint32_t r = 0; r < state->ranks && r < v->ranks; r++)
        restore_rank(view_rank(v, r), &state->rank[r], policy, same_policy);
    if (!same_policy) return PYPS_OK;
    memcpy(v->shared_state, state->policy_state, sizeof v->shared_state);
    return policy->restore ? policy->restore(v, state) : PYPS_OK;
}
