/* policy_saps.c: SaPS, the straggler-aware parameter server. Known of it (Yu and others, HPCC 2019,
 * abstract): stragglers show by the version of their parameters, and staleness is limited without waiting for
 * them. What stands here is a reconstruction.
 *
 * A gradient with staleness above s is not taken: its samples go back, nobody waits. s is fixed, or the
 * quantile of the stalenesses seen, or Ringmaster ASGD's (Maranjyan, Tyurin, Richtarik: ICML 2025),
 * max(N, ceil(S / (b |G|^2))), with S (the noise) and |G|^2 (the signal) from E|g|^2 = |G|^2 + S / b, a line
 * fitted through the squared norms of gradients of unlike batches.
 *
 * A worker that is always late would never be heard: whose staleness is above s on average claims fewer
 * samples, as many as it can do in time; and before its staleness passes s, it pushes the micro-batches that
 * it has done.
 * If one sample alone is too late, s rises to what that takes, unless s is fixed.
 */
#include <math.h>

#include "policy/policy.h"

#define FORGET     (63.0 / 64) /* of the line's sums, at each push */
#define MOST_NOISE 16          /* s is at most so many times N by noise */
#define UNTOLD     2           /* and this many times N while batches are equal, which tell no noise */
#define STEP       0.05        /* of the tracked quantile, relative to itself */
#define RECENT     4           /* claims that a worker's lateness is the mean of */
#define MARGIN     0.8         /* of s: what claims of late workers are to have */

static double noise_bound(const struct view *v) {
    const struct lateness *l = &v->late;
    double spread = l->n * l->xx - l->x * l->x, least = v->active, most = MOST_NOISE * least;
    if (l->n < 8 || spread <= 1e-6 * l->n * l->xx) return UNTOLD * least; /* slope and level are one */
    double noise = (l->n * l->xy - l->x * l->y) / spread;
    double signal = (l->y - noise * l->x) / l->n, batch = l->n / l->x;
    if (noise <= 0) return least;
    if (signal <= 0) return most;
    double bound = ceil(noise / (batch * signal));
    return bound < least ? least : bound > most ? most : bound;
}

static uint64_t bound(const struct view *v) {
    if (v->policy_params.threshold == PYPS_FIXED)
        return v->policy_params.bound == UINT32_MAX ? UINT64_MAX : v->policy_params.bound;
    double found = v->policy_params.threshold == PYPS_RINGMASTER ? noise_bound(v) : v->late.tracked;
    if (found < v->active) found = v->active;
    return whole(found > v->late.heard ? found : v->late.heard, UINT64_MAX / 2);
}

/* Stochastic approximation of a quantile (Robbins and Monro, 1951). */
static void track(struct view *v, uint64_t staleness) {
    struct lateness *l = &v->late;
    double step = STEP * (l->tracked > 1 ? l->tracked : 1), q = v->policy_params.quantile;
    l->tracked += (double)staleness > l->tracked ? step * q : -step * (1 - q);
    if (l->tracked < 0) l->tracked = 0;
}

static void weigh(struct view *v, const struct event *e) {
    struct lateness *l = &v->late;
    double x = 1.0 / e->samples, y = e->grad_norm_squared;
    l->n = l->n * FORGET + 1, l->x = l->x * FORGET + x, l->y = l->y * FORGET + y;
    l->xx = l->xx * FORGET + x * x, l->xy = l->xy * FORGET + x * y;
}

/* Who is late on average claims what it can do in time: staleness grows with the work. */
static void size_claims(struct view *v, const struct member *m, uint64_t staleness, uint64_t most) {
    struct rank *rank = view_rank(v, (uint32_t)m->rank);
    double late = (double)staleness / m->claim_count;
    rank->lateness = rank->lateness > 0 ? rank->lateness + (late - rank->lateness) / RECENT : late;
    if (rank->lateness * rank->total.batch <= (double)most) {
        rank->share = 0;
        return;
    }
    uint64_t fits = whole(MARGIN * (double)most / rank->lateness, rank->total.batch);
    rank->share = fits ? (uint32_t)fits : 1;
}

/* A sample by itself is too late: unless s is fixed, it rises. */
static void hear(struct view *v, const struct member *m, uint64_t staleness) {
    if (m->claim_count == 1 && v->late.heard < (double)staleness) v->late.heard = (double)staleness;
}

static enum push_decision on_push(struct view *v, const struct event *e, struct outcome *out) {
    const struct member *m = view_member(v, e->slot);
    uint64_t most = bound(v);
    if (e->samples) track(v, out->staleness);
    if (e->samples && e->grad_norm_squared > 0 && isfinite(e->grad_norm_squared)) weigh(v, e);
    if (e->samples) size_claims(v, m, out->staleness, most);
    if (out->staleness <= most) return PUSH_ADMIT;
    hear(v, m, out->staleness);
    return PUSH_REJECT;
}

/* Staleness grows with the work: after the next micro-batch it will be (done + next) / done times as much. */
static int on_check(struct view *v, const struct event *e) {
    const struct member *m = view_member(v, e->slot);
    uint64_t staleness = v->version - m->pulled_version, most = bound(v);
    if (staleness > most) {
        if (!v->policy_params.abort) return PYPS_CONTINUE;
        track(v, staleness);
        size_claims(v, m, staleness, most);
        hear(v, m, staleness);
        return PYPS_ABORT;
    }
    bool late = e->done && (double)staleness * ((double)e->done + e->next) > (double)most * e->done;
    return late ? PYPS_PUSH_NOW : PYPS_CONTINUE;
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
                                   .on_push = on_push,
                                   .on_check = on_check};
