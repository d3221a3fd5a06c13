/* policy_saps.c: SaPS, the straggler-aware parameter server. The paper's abstract (Yu and others, HPCC 2019)
 * says: stragglers show by the version of their parameters, and staleness is limited without waiting for
 * them. The rest is a reconstruction.
 *
 * There is a bound s on staleness, and no worker waits. A gradient later than s is weighed by s / staleness, or
 * it is rejected: its samples go back. s is
 *
 *   measured      from the workers' times: see saps_bound.c. Staleness then counts samples, in planned batches of
 *                 mean size, so that a push of a few samples does not make others late.
 *   fixed
 *   a quantile    of the stalenesses so far, at least N
 *   Ringmaster's  max(N, ceil(S / (b |G|^2))) (Ringmaster ASGD: Maranjyan, Tyurin, Richtarik: ICML 2025). There S
 *                 is the gradient noise and |G|^2 the signal; both come from a line fitted through the squared
 *                 norms of gradients of different batches: E|g|^2 = |G|^2 + S / b.
 *
 * A worker that is always late would never contribute if late gradients are rejected. So, unless s is fixed, the
 * next gradient after some rejected in a row is weighed. Under a fixed s a worker that is late on average claims
 * fewer samples, as many as it can compute in time. And a worker pushes the micro-batches it has done before its
 * staleness passes s.
 *
 * A pipeline of depth d makes gradients older by d - 1 steps of every worker. So no s of a quantile or of
 * Ringmaster's is less than N * d, and no claim is made so far ahead that the pushes before it alone would make it
 * too late.
 */
#include <math.h>

#include "policy/saps_bound.h"

#define DECAY         (63.0 / 64) /* of the sums of the fitted line, at each push */
#define MAX_NOISE     16          /* the bound from noise is at most this many times N */
#define UNKNOWN_NOISE 2           /* times N, while all batches are equal and so tell nothing about noise */
#define STEP          0.05        /* of the estimated quantile, relative to itself */
#define RECENT        4           /* claims over which a worker's staleness per sample is averaged */
#define MARGIN        0.8         /* of s: the staleness that the claims of late workers aim at */
#define PATIENCE      7           /* gradients of a worker rejected in a row, before one is weighed */
#define SETTINGS      4           /* of the measured bound, for each N pushes; more when a run begins */

static bool is_measured(const struct view *v) { return v->policy_params.threshold == PYPS_MEASURED; }
static bool is_fixed(const struct view *v) { return v->policy_params.threshold == PYPS_FIXED; }

static double noise_bound(const struct view *v) {
    const struct staleness_limit *l = saps_limit(v);
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
    const struct staleness_limit *l = saps_limit(v);
    if (is_fixed(v)) return v->policy_params.bound == UINT32_MAX ? UINT64_MAX : v->policy_params.bound;
    if (is_measured(v)) return l->limit > 0 ? policy_whole(l->limit, UINT64_MAX / 2) : UINT64_MAX;
    double found = v->policy_params.threshold == PYPS_RINGMASTER ? noise_bound(v) : l->quantile;
    double least = (double)v->active * (1 + m->wants_ahead);
    return policy_whole(found > least ? found : least, UINT64_MAX / 2);
}

/* Of a gradient computed on what its worker pulled last, or on the `older` versions before that. */
static double staleness_of(const struct view *v, const struct member *m, uint64_t older) {
    const struct staleness_limit *l = saps_limit(v);
    if (!is_measured(v) || !(l->mean_batch > 0)) return (double)(v->version - m->pulled_version + older);
    uint64_t pulled = saps_rank(view_rank(v, (uint32_t)m->rank))->pulled_samples;
    return (double)(l->samples - pulled) / l->mean_batch + (double)older;
}

/* Stochastic approximation of a quantile (Robbins and Monro, 1951). */
static void track_quantile(struct view *v, uint64_t staleness) {
    struct staleness_limit *l = saps_limit(v);
    double step = STEP * (l->quantile > 1 ? l->quantile : 1), q = v->policy_params.quantile;
    l->quantile += (double)staleness > l->quantile ? step * q : -step * (1 - q);
    if (l->quantile < 0) l->quantile = 0;
}

static void fit_line(struct view *v, const struct event *e) {
    struct staleness_limit *l = saps_limit(v);
    double x = 1.0 / e->samples, y = e->grad_norm_squared;
    l->n = l->n * DECAY + 1, l->x = l->x * DECAY + x, l->y = l->y * DECAY + y;
    l->xx = l->xx * DECAY + x * x, l->xy = l->xy * DECAY + x * y;
}

/* A worker that is late on average claims what it can compute in time: staleness grows with the work. If not even
 * a sample is in time, it claims its batch; of one alone it claims two, unless the model can train on one. */
static void size_claims(struct view *v, const struct member *m, uint64_t staleness, uint64_t limit) {
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    double per_sample = (double)staleness / m->claim_count;
    struct saps_rank *own = saps_rank(rank);
    if (own->staleness_per_sample > 0)
        own->staleness_per_sample += (per_sample - own->staleness_per_sample) / RECENT;
    else own->staleness_per_sample = per_sample;
    rank->next_batch = 0;
    if (own->staleness_per_sample * rank->total.batch <= (double)limit) return; /* in time */
    double fits = MARGIN * (double)limit / own->staleness_per_sample;
    rank->next_batch = (uint32_t)policy_whole(fits, rank->total.batch);
    if (rank->next_batch == 1 && !view_samples_single(v)) rank->next_batch = 2;
}

/* What a push, or a check of a late worker, says of the workers' times and stalenesses. */
static void observe(struct view *v, const struct event *e, uint32_t samples, uint64_t staleness,
                    uint64_t limit) {
    const struct member *m = view_member(v, e->slot);
    struct staleness_limit *l = saps_limit(v);
    track_quantile(v, staleness);
    if (is_fixed(v) && v->policy_params.late == PYPS_DROP) size_claims(v, m, staleness, limit);
    if (!is_measured(v)) return;
    saps_time_claim(v, e, samples);
    saps_see_gradient(v, e, staleness_of(v, m, staleness - (v->version - m->pulled_version)));
    if (l->limit > 0 && ++l->pushes < l->interval) return;
    uint64_t next = l->interval ? 2 * l->interval : 1, longest = v->active / SETTINGS;
    l->pushes = 0, l->interval = next < longest ? next : longest;
    saps_set_bound(v, e->now);
}

/* Is a late gradient applied all the same? Counts those of a worker that are not. */
static bool is_heard(struct view *v, const struct member *m) {
    struct saps_rank *own = saps_rank(view_rank(v, (uint32_t)m->rank));
    if (v->policy_params.late == PYPS_WEIGH) return true;
    if (is_fixed(v) || own->rejected < PATIENCE) {
        own->rejected += own->rejected < PATIENCE;
        return false;
    }
    return true;
}

static enum start_decision on_start(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    (void)out;
    return e->kind == EVENT_START_AHEAD && v->policy_params.late == PYPS_DROP && m->ahead >= bound(v, m)
               ? START_WAIT
               : START_GO;
}

static void on_pull(struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    struct saps_rank *own = saps_rank(view_rank(v, (uint32_t)m->rank));
    own->pulled_samples = saps_limit(v)->samples;
    own->pulled = *saps_sum(v);
    for (uint64_t k = v->version; k > m->pulled_version && k + v->tickets > v->version; k--)
        own->pulled_samples -= view_ticket(v, k)->samples; /* admitted since that version */
}

static bool on_push(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    if (!e->samples) return true;
    uint64_t limit = bound(v, m);
    observe(v, e, e->samples, out->staleness, limit);
    if (e->grad_norm_squared > 0 && isfinite(e->grad_norm_squared)) fit_line(v, e);
    limit = is_measured(v) ? bound(v, m) : limit;
    double staleness = staleness_of(v, m, out->staleness - (v->version - m->pulled_version)), weight = 1;
    if (staleness > (double)limit) {
        if (!is_heard(v, m)) return false;
        weight = saps_weight(staleness, (double)limit);
    }
    if (is_measured(v) && v->policy_params.late == PYPS_WEIGH) weight /= saps_limit(v)->mean_weight;
    out->scale = (float)weight;
    saps_rank(view_rank(v, (uint32_t)m->rank))->rejected = 0;
    saps_limit(v)->samples += e->samples;
    return true;
}

/* Staleness grows with the work: the next micro-batch makes it (done + next) / done times as much. */
static int on_check(struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    if (v->policy_params.late == PYPS_WEIGH) return PYPS_CONTINUE;
    uint64_t limit = bound(v, m);
    double staleness = staleness_of(v, m, 0);
    if (staleness > (double)limit) {
        if (!v->policy_params.abort || is_heard(v, m)) return PYPS_CONTINUE;
        observe(v, e, e->done, v->version - m->pulled_version, limit);
        return PYPS_ABORT;
    }
    bool late = e->done && staleness * ((double)e->done + e->next) > (double)limit * e->done;
    return late ? PYPS_PUSH_NOW : PYPS_CONTINUE;
}

/* Batches have changed, and times with them. */
static void on_replan(struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++) saps_rank(view_rank(v, r))->cycles = 0;
}

static void on_join(struct rank *rank) { saps_rank(rank)->cycles = 0, saps_rank(rank)->pulled_samples = 0; }

static void save_rank(const struct rank *rank, pyps_rank_state *out) {
    out->staleness_per_sample = saps_rank(rank)->staleness_per_sample;
}

static void restore_rank(struct rank *rank, const pyps_rank_state *from) {
    saps_rank(rank)->staleness_per_sample = from->staleness_per_sample;
}

static int restore(struct view *v, const pyps_state *state) {
    (void)state;
    struct staleness_limit *l = saps_limit(v);
    const double numbers[] = {l->limit, l->quantile, l->n,          l->x,      l->y,
                              l->xx,    l->xy,       l->mean_batch, l->length, l->batches};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!(numbers[i] >= 0 && isfinite(numbers[i])))
            return fail(PYPS_EINVAL,
                        "state: policy_state[%zu]: found %g; expected a finite number of at least 0", i,
                        numbers[i]);
    if (!isfinite(l->agreement)) l->agreement = 0, l->estimates = 0;
    l->limit = l->mean_batch = l->mean_weight = 0,
    l->samples = l->pushes = l->interval = 0; /* times are measured anew */
    return PYPS_OK;
}

static bool fits_noise(const pyps_policy_params *params) {
    return !params || params->threshold == PYPS_RINGMASTER;
}

static int check_params(const pyps_policy_params *params) {
    int rc = policy_check_number("threshold", params->threshold, PYPS_FIXED, PYPS_MEASURED);
    if (!rc) rc = policy_check_number("late", params->late, PYPS_DROP, PYPS_WEIGH);
    if (!rc && params->late == PYPS_WEIGH) rc = policy_check_number("abort", params->abort, 0, 0);
    if (!rc && params->late == PYPS_WEIGH && params->threshold == PYPS_FIXED)
        rc = policy_check_number("bound", params->bound, 1, UINT32_MAX);
    if (!rc && params->threshold == PYPS_MEASURED) rc = policy_check_number("noise", params->noise, -1, 1e9);
    if (rc || params->threshold != PYPS_QUANTILE) return rc;
    return policy_check_number("quantile", params->quantile, 0.01, 0.999);
}

const struct policy policy_saps = {.name = "saps",
                                   .starts_at_once = true,
                                   .needs_grad_norm = fits_noise,
                                   .needs_sketch = saps_measures_noise,
                                   .check_params = check_params,
                                   .on_start = on_start,
                                   .on_pull = on_pull,
                                   .on_push = on_push,
                                   .on_check = on_check,
                                   .on_replan = on_replan,
                                   .on_join = on_join,
                                   .save_rank = save_rank,
                                   .restore_rank = restore_rank,
                                   .restore = restore};
