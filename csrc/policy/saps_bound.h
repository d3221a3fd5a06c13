/* saps_bound.h: SaPS's bound on staleness, from the times that the workers take and the noise of their gradients. */
#ifndef PYPS_SAPS_BOUND_H
#define PYPS_SAPS_BOUND_H

#include "policy/policy.h"

/* SaPS's own words of a view. */
struct staleness_limit {
    double limit;           /* measured; 0: not yet */
    double quantile;        /* of the stalenesses */
    double n, x, y, xx, xy; /* decayed sums over pushes, of x = 1 / samples and y = |g|^2 */
    double mean_batch;      /* planned, of the workers whose times are known */
    uint64_t samples;       /* of all pushes */
    uint64_t pushes;        /* since the limit was set, rejected ones included */
    uint64_t interval;      /* pushes after which it is set again */
    double mean_weight;     /* of gradients under this limit; 0: not known */
    double agreement;       /* of a gradient and the others, over its own squared length: a moving average */
    double length;          /* squared, of a gradient of a mean batch: a moving average */
    double batches;         /* mean ones, in a push: a moving average */
    uint64_t estimates;     /* how many `agreement` is of */
} __attribute__((may_alias));

/* Those that no state has. */
struct gradient_sum {
    double sketch[SKETCH]; /* of the gradients so far, each times its batches */
    double batches;
} __attribute__((may_alias));

/* And of a rank. */
struct saps_rank {
    double cycle_seconds;        /* of a claim of its planned batch: a moving average */
    double staleness_per_sample; /* of a claim: a moving average */
    double claim_seconds;        /* as the bound was last set by */
    uint64_t pulled_samples;     /* of all pushes up to the version that its worker pulled last */
    uint32_t cycles;             /* how many were measured */
    uint32_t by_speed;           /* the rank that was at place `this index` when the bound was last set */
    uint32_t rejected;           /* of its gradients, in a row */
    uint32_t reserved;
    struct gradient_sum pulled; /* as its worker pulled last */
} __attribute__((may_alias));

_Static_assert(sizeof(struct staleness_limit) <= sizeof((struct view *)0)->shared_state,
               "in the view's words");
_Static_assert(sizeof(struct gradient_sum) <= sizeof((struct view *)0)->shared_own, "in the view's words");
_Static_assert(sizeof(struct saps_rank) <= sizeof((struct rank *)0)->own, "in a rank's words");

static inline struct staleness_limit *saps_limit(const struct view *v) {
    return (struct staleness_limit *)(uintptr_t)v->shared_state;
}
static inline struct gradient_sum *saps_sum(const struct view *v) {
    return (struct gradient_sum *)(uintptr_t)v->shared_own;
}
static inline struct saps_rank *saps_rank(const struct rank *r) {
    return (struct saps_rank *)(uintptr_t)r->own;
}

/* saps_noise.c */
bool saps_measures_noise(const pyps_policy_params *params); /* or it is given */
/* A push with a sketch of its gradient, so many mean batches late, tells of the noise. */
void saps_see_gradient(struct view *view, const struct event *event, double staleness);
double saps_noise(const struct view *view); /* steps that are lost to it, in mean batches */

/* saps_bound.c */
/* A push ends a claim, or a check finds `samples` of it computed: notes how long they took. */
void saps_time_claim(struct view *view, const struct event *event, uint32_t samples);
double saps_weight(double staleness, double limit); /* of a gradient that is so late */
/* Sets limit, mean_weight and mean_batch. */
void saps_set_bound(struct view *view, uint64_t now);

#endif
