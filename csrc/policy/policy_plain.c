/* policy_plain.c: policies that take every gradient as it comes, and at most weigh it.
 *
 * ASP: every gradient is one step, applied at once.
 * DynSGD: a push takes 1 / (staleness + 1) of a step (Jiang, Cui, Zhang, Yu: Heterogeneity-aware distributed
 * parameter servers, SIGMOD 2017).
 * ConSGD, of the same paper: a push takes 1 / workers of a step. So do ASP's pushes by their part of a global batch:
 * it is another name of ASP, and is refused where a push is a whole step.
 * DC-ASGD: ASP, with a gradient corrected for its delay (Zheng and others: Asynchronous SGD with delay
 * compensation, ICML 2017). The store corrects it, because only the store has both parameters.
 */
#include "policy/policy.h"

/* The workers whose pushes make up a step, of which each takes its part by its samples already; 1 where each is one. The
 * last one may push what it holds while it rests already. */
static float pushes_a_step(const struct view *v) {
    return v->policy_params.scaling == PYPS_SCALE_NONE || !v->active ? 1.0f : (float)v->active;
}

static float by_staleness(const struct view *v, uint64_t staleness) {
    return pushes_a_step(v) / (float)(staleness + 1);
}

static int check_consgd(const pyps_policy_params *params) {
    return policy_check_number("scaling", params->scaling, PYPS_SCALE_SAMPLES, PYPS_SCALE_SAMPLES);
}

static int check_dcasgd(const pyps_policy_params *params) {
    return policy_check_number("correction", params->correction, 0, 1e9);
}

static bool corrects(const pyps_policy_params *params) { return !params || params->correction > 0; }

const struct policy policy_asp = {.name = "asp", .starts_at_once = true};
const struct policy policy_consgd = {.name = "consgd", .starts_at_once = true, .check_params = check_consgd};
const struct policy policy_dynsgd = {.name = "dynsgd", .starts_at_once = true, .weight = by_staleness};
const struct policy policy_dcasgd = {
    .name = "dcasgd", .starts_at_once = true, .needs_base_params = corrects, .check_params = check_dcasgd};
