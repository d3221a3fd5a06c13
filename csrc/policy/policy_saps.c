/* policy_saps.c: SaPS, the straggler-aware parameter server. The paper's abstract (Yu and others, HPCC 2019)
 * says: stragglers show by the version of their parameters, and staleness is limited without waiting for
 * them. The rest is a reconstruction.
 *
 * A gradient whose staleness is above a bound s is rejected: its samples go back and no worker waits. s is
 * fixed, or a quantile of the stalenesses so far, or that of Ringmaster ASGD (Maranjyan, Tyurin, Richtarik:
 * ICML 2025), max(N, ceil(S / (b |G|^2))). There S is the gradient noise and |G|^2 the signal; both come from
 * a line fitted through the squared norms of gradients of different batches: E|g|^2 = |G|^2 + S / b.
 *
 * A worker that is always late would never contribute. So a worker whose staleness is above s on average
 * claims fewer samples, as many as it can compute in time; and a worker pushes the micro-batches it has done
 * before its staleness passes s. If a single sample is too late, s rises to the staleness of that sample,
 * unless s is fixed.
 *
 * A pipeline of depth d makes gradients older by d - 1 steps of every worker. So no s but a fixed one is less
 * than N * d, and no claim is made so far ahead that the pushes before it alone would make it too late.
 */
#include <math.h>

#include "error.h"
#include "policy/policy.h"

#define DECAY         (63.0 / 64) /* of the sums of the fitted line, at each push */
#define MAX_NOISE     16          /* the bound from noise is at most this many times N */
#define UNKNOWN_NOISE 2           /* times N, while all batches are equal and so tell nothing about noise */
#define STEP          0.05        /* of the estimated quantile, relative to itself */
#define RECENT        4           /* claims over which a worker's staleness per sample is averaged */
#define MARGIN        0.8         /* of s: the staleness that the claims of late workers aim at */

static double noise_bound(const struct view *v) {
    const struct staleness_limit *l = &v->staleness_limit;
    double spread = l->n * l->xx - l->x * l->x, least = v->active, greatest = MAX_NOISE * least;
    if (l->n < 8 || spread <= 1e-6 * l->n * l->xx)
        return UNKNOWN_NOISE * least; /* the line has no slope yet */
    double noise = (l->n * l->xy - l->x * l->y) / spread;
    double signal = (l->y - noise * l->x) / l->n, batch = l->n / l->x;
    if (noise <= 0) return least;
    if (signal <= 0) return greatest;
    double bound = ceil(noise / (batch * signal));
    return bound < least ? least : bound > greatest ? greatest : bound;
}

static uint64_t bound(const struct view *v, const struct member *m) {
    if (v->policy_params.threshold == PYPS_FIXED)
        return v->policy_params.bound == UINT32_MAX ? UINT64_MAX : v->policy_params.bound;
    double found =
        v->policy_params.threshold == PYPS_RINGMASTER ? noise_bound(v) : v->staleness_limit.quantile;
    double least = (double)v->active * (1 + m->wants_ahead);
    if (found < least) found = least;
    return policy_whole(found > v->staleness_limit.min_bound ? found : v->staleness_limit.min_bound,
                        UINT64_MAX / 2);
}

/* Stochastic approximation of a quantile (Robbins and Monro, 1951). */
static void track_quantile(struct view *v, uint64_t staleness) {
    struct staleness_limit *l = &v->staleness_limit;
    double step = STEP * (l->quantile > 1 ? l->quantile : 1), q = v->policy_params.quantile;
    l->quantile += (double)staleness > l->quantile ? step * q : -step * (1 - q);
    if (l->quantile < 0) l->quantile = 0;
}

static void fit_line(struct view *v, const struct event *e) {
    struct staleness_limit *l = &v->staleness_limit;
    double x = 1.0 / e->samples, y = e->grad_norm_squared;
    l->n = l->n * DECAY + 1, l->x = l->x * DECAY + x, l->y = l->y * DECAY + y;
    l->xx = l->xx * DECAY + x * x, l->xy = l->xy * DECAY + x * y;
}

/* A worker that is late on average claims what it can compute in time: staleness grows with the work. */
static void size_claims(struct view *v, const struct member *m, uint64_t staleness, uint64_t limit) {
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    double per_sample = (double)staleness / m->claim_count;
    rank->staleness_per_sample =
        rank->staleness_per_sample > 0
            ? rank->staleness_per_sample + (per_sample - rank->staleness_per_sample) / RECENT
            : per_sample;
    if (rank->staleness_per_sample * rank->total.batch <= (double)limit) {
        rank->next_batch = 0;
        return;
    }
    uint64_t fits = policy_whole(MARGIN * (double)limit / rank->staleness_per_sample, rank->total.batch);
    rank->next_batch = fits ? (uint32_t)fits : 1;
}

/* A single sample is too late: s rises, unless it is fixed. */
static void raise_min_bound(struct view *v, const struct member *m, uint64_t staleness) {
    if (m->claim_count == 1 && v->staleness_limit.min_bound < (double)staleness)
        v->staleness_limit.min_bound = (double)staleness;
}

static enum start_decision on_start(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    (void)out;
    return e->kind == EVENT_START_AHEAD && m->ahead >= bound(v, m) ? START_WAIT : START_GO;
}

static enum push_decision on_push(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    uint64_t limit = bound(v, m);
    if (e->samples) track_quantile(v, out->staleness);
    if (e->samples && e->grad_norm_squared > 0 && isfinite(e->grad_norm_squared)) fit_line(v, e);
    if (e->samples) size_claims(v, m, out->staleness, limit);
    if (out->staleness <= limit) return PUSH_ADMIT;
    raise_min_bound(v, m, out->staleness);
    return PUSH_REJECT;
}

/* Staleness grows with the work: the next micro-batch makes it (done + next) / done times as much. */
static int on_check(struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    uint64_t staleness = v->version - m->pulled_version, limit = bound(v, m);
    if (staleness > limit) {
        if (!v->policy_params.abort) return PYPS_CONTINUE;
        track_quantile(v, staleness);
        size_claims(v, m, staleness, limit);
        raise_min_bound(v, m, staleness);
        return PYPS_ABORT;
    }
    bool late = e->done && (double)staleness * ((double)e->done + e->next) > (double)limit * e->done;
    return late ? PYPS_PUSH_NOW : PYPS_CONTINUE;
}

static int restore(struct view *v, const pyps_state *state) {
    (void)state;
    const struct staleness_limit *l = &v->staleness_limit;
    const double numbers[] = {l->min_bound, l->quantile, l->n, l->x, l->y, l->xx, l->xy};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!(numbers[i] >= 0 && isfinite(numbers[i])))
            return fail(PYPS_EINVAL,
                        "state: policy_state[%zu]: found %g; expected a finite number of at least 0", i,
                        numbers[i]);
    return PYPS_OK;
}

static bool fits_noise(const pyps_policy_params *params) {
    return !params || params->threshold == PYPS_RINGMASTER;
}

static int check_params(const pyps_policy_params *params) {
    int rc = policy_check_number("threshold", params->threshold, PYPS_FIXED, PYPS_RINGMASTER);
    if (rc || params->threshold != PYPS_QUANTILE) return rc;
    return policy_check_number("quantile", params->quantile, 0.01, 0.999);
}

const struct policy policy_saps = {.name = "saps",
                                   .needs_grad_norm = fits_noise,
                                   .check_params = check_params,
                                   .on_start = on_start,
                                   .on_push = on_push,
                                   .on_check = on_check,
                                   .restore = restore};
