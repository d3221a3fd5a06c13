/* saps_noise.c: the noise of gradients, as SaPS measures it.
 *
 * g is a gradient of f mean batches, G the true one, S the noise of a mean batch: E f |g|^2 = f |G|^2 + S. Gradients of
 * other samples have other noise, so the inner product of g and the mean h of those that were pushed between its
 * worker's pull and its own push is about |G|^2: none of them is in the parameters that g was computed on. (Noise that is
 * in them is in g again, and would count as signal.) So the steps lost to noise are
 *
 *     x = S / |G|^2 = 1 / c - f,   c = g.h / (f |g|^2)
 *
 * c is a moving average over N pushes, f |g|^2 in it one over N / 2, because gradients shrink. So c is late, and x is
 * taken as ROOM times that. Of pushes more than N steps late h and |g|^2 have nothing: their parameters are too far from
 * the others'. Inner products are those of sketches.
 */
#include <math.h>

#include "policy/saps_bound.h"

#define UNKNOWN 4.0 /* x until there are */
#define ENOUGH  8   /* estimates */
#define ROOM    3.0
#define LEAST   0.25 /* x is between this and */
#define MOST    64.0 /* times N */

bool saps_measures_noise(const pyps_policy_params *params) {
    return !params || (params->threshold == PYPS_MEASURED && params->noise < 0);
}

/* The mean of all values at first, then of about the last `window`; of any sign. */
static void average(double *mean, double newest, uint64_t count, double window) {
    *mean += (newest - *mean) / fmax(1, fmin((double)count, window));
}

void saps_see_gradient(struct view *v, const struct event *e, double staleness) {
    const struct member *m = view_member(v, e->slot);
    struct staleness_limit *l = saps_limit(v);
    struct gradient_sum *sum = saps_sum(v), *pulled = &saps_rank(view_rank(v, (uint32_t)m->rank))->pulled;
    double workers = v->active * (1.0 + m->wants_ahead), agreement = 0, length = 0;
    if (!e->sketched || !(l->mean_batch > 0)) return;
    double batches = e->samples / l->mean_batch, others = sum->batches - pulled->batches;
    for (uint32_t i = 0; i < SKETCH; i++) {
        agreement += (double)e->sketch[i] * (sum->sketch[i] - pulled->sketch[i]);
        length += (double)e->sketch[i] * e->sketch[i];
    }
    if (!isfinite(agreement) || !(length > 0) || !isfinite(length)) return;
    uint64_t count = l->estimates + 1;
    if (staleness <= workers) average(&l->length, batches * length, count, workers / 2);
    if (others > 0) {
        l->estimates = count;
        average(&l->agreement, agreement / others / l->length, count, workers);
        average(&l->batches, batches, count, workers);
    }
    if (staleness > workers) return;
    for (uint32_t i = 0; i < SKETCH; i++) sum->sketch[i] += batches * e->sketch[i];
    sum->batches += batches;
}

double saps_noise(const struct view *v) {
    const struct staleness_limit *l = saps_limit(v);
    double most = MOST * v->active;
    if (!saps_measures_noise(&v->policy_params)) return v->policy_params.noise;
    if (l->estimates < ENOUGH) return UNKNOWN;
    if (!(l->agreement > 0)) return most;
    return fmin(fmax(ROOM * (1 / l->agreement - l->batches), LEAST), most);
}
