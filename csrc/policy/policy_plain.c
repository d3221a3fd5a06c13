/* policy_plain.c: policies that take every gradient as it comes, and at most weigh it.
 *
 * ASP: every gradient is one step, applied at once.
 * DynSGD: a push takes 1 / (staleness + 1) of a step (Jiang, Cui, Zhang, Yu: Heterogeneity-aware distributed
 * parameter servers, SIGMOD 2017). Where pushes are parts of a step by their samples, that is divided by its own mean
 * over samples, so that a learning rate moves the parameters as far as under the others, however late gradients are.
 */
#include <math.h>

#include "policy/policy.h"

#define WINDOW 8 /* pushes of each worker that the mean weight is of: a slow one's are few */

/* Sums over pushes, in which older ones count less. */
struct mean_weight {
    double weights, samples; /* weights: each times its samples */
} __attribute__((may_alias));

_Static_assert(sizeof(struct mean_weight) <= sizeof((struct view *)0)->shared_state, "in the view's words");

static float by_staleness(const struct view *v, uint64_t staleness) {
    (void)v;
    return 1.0f / (float)(staleness + 1);
}

static bool over_mean(struct view *v, const struct event *e, struct outcome *out) {
    struct mean_weight *mean = (struct mean_weight *)v->shared_state;
    if (!e->samples || v->policy_params.scaling == PYPS_SCALE_NONE) return true;
    double kept = 1 - 1.0 / (WINDOW * (v->active + 1.0));
    mean->weights = kept * mean->weights + (double)out->scale * e->samples;
    mean->samples = kept * mean->samples + e->samples;
    out->scale *= (float)(mean->samples / mean->weights);
    return true;
}

static int restore_mean(struct view *v, const pyps_state *state) {
    const struct mean_weight *mean = (struct mean_weight *)v->shared_state;
    (void)state;
    if (mean->weights >= 0 && mean->samples >= mean->weights && isfinite(mean->samples)) return PYPS_OK;
    return fail(PYPS_EINVAL,
                "state: policy_state: found weights %g of %g samples; expected no more than them",
                mean->weights, mean->samples);
}

const struct policy policy_asp = {.name = "asp", .starts_at_once = true};
const struct policy policy_dynsgd = {.name = "dynsgd",
                                     .starts_at_once = true,
                                     .weight = by_staleness,
                                     .on_push = over_mean,
                                     .restore = restore_mean};
