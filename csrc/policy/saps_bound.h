/* saps_bound.h: SaPS's bound on staleness, from the times that the workers take. */
#ifndef PYPS_SAPS_BOUND_H
#define PYPS_SAPS_BOUND_H

#include "policy/view.h"

/* A push ends a claim, or a check finds `samples` of it computed: notes how long they took. */
void saps_time_claim(struct view *view, const struct event *event, uint32_t samples);
/* Sets staleness_limit.limit and mean_batch. */
void saps_set_bound(struct view *view, uint64_t now);

#endif
