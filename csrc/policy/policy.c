/* policy.c: the policies by number, what each needs, and the policies that only scale a gradient.
 *
 * ASP: every gradient is one step, applied at once.
 * DynSGD: a push takes 1 / (staleness + 1) of a step (Jiang, Cui, Zhang, Yu: Heterogeneity-aware distributed
 * parameter servers, SIGMOD 2017).
 * ConSGD: a push takes 1 / workers of a step.
 * DC-ASGD: ASP, with a gradient corrected for its delay (Zheng and others: Asynchronous SGD with delay
 * compensation, ICML 2017). The store corrects it, because only the store has both parameters.
 */
#include "policy/policy.h"

#include <math.h>

#include "error.h"

static enum push_decision admit(struct view *v, const struct event *e, struct outcome *out) {
    (void)v, (void)e, (void)out;
    return PUSH_ADMIT;
}

/* The last one may push what it holds while it rests already. */
static float workers(const struct view *v) { return v->active ? (float)v->active : 1.0f; }

/* The workers whose pushes make up a step, of which each takes its part by its samples already; 1 where each is one. */
static float pushes_a_step(const struct view *v) {
    return v->policy_params.scaling == PYPS_SCALE_NONE ? 1.0f : workers(v);
}

static enum push_decision admit_by_staleness(struct view *v, const struct event *e, struct outcome *out) {
    (void)e;
    out->scale = pushes_a_step(v) / (float)(out->staleness + 1);
    return PUSH_ADMIT;
}

static enum push_decision admit_by_share(struct view *v, const struct event *e, struct outcome *out) {
    (void)e;
    out->scale = pushes_a_step(v) / workers(v);
    return PUSH_ADMIT;
}

static int check_dcasgd(const pyps_policy_params *params) {
    return policy_check_number("correction", params->correction, 0, 1e9);
}

static bool corrects(const pyps_policy_params *params) { return !params || params->correction > 0; }

const struct policy policy_asp = {.name = "asp", .starts_at_once = true, .on_push = admit};
const struct policy policy_dynsgd = {.name = "dynsgd", .starts_at_once = true, .on_push = admit_by_staleness};
const struct policy policy_consgd = {.name = "consgd", .starts_at_once = true, .on_push = admit_by_share};
const struct policy policy_dcasgd = {.name = "dcasgd",
                                     .starts_at_once = true,
                                     .needs_base_params = corrects,
                                     .check_params = check_dcasgd,
                                     .on_push = admit};

static const struct policy *const policies[] = {
    [PYPS_BSP] = &policy_bsp,           [PYPS_ASP] = &policy_asp,       [PYPS_BACKUP] = &policy_backup,
    [PYPS_SOFTSYNC] = &policy_softsync, [PYPS_SSP] = &policy_ssp,       [PYPS_DSSP] = &policy_dssp,
    [PYPS_DYNSGD] = &policy_dynsgd,     [PYPS_CONSGD] = &policy_consgd, [PYPS_DCASGD] = &policy_dcasgd,
    [PYPS_SAPS] = &policy_saps,         [PYPS_R2SP] = &policy_r2sp,     [PYPS_HPS] = &policy_hps,
    [PYPS_CUSTOM] = &policy_custom,
};

const struct policy *policy_find(uint32_t number) {
    return number < sizeof policies / sizeof *policies ? policies[number] : NULL;
}

int policy_check(uint32_t number, const pyps_policy_params *params) {
    const struct policy *policy = policy_find(number);
    if (!policy) return fail(PYPS_EPOLICY, "policy: found %u; unknown here", number);
    if (!policy->needs_base_params && !(params->correction >= 0 && params->correction <= 0))
        return fail(PYPS_EINVAL,
                    "policy_params: correction: found %g; expected 0: the policy %s corrects nothing",
                    params->correction, policy->name);
    int rc = policy_check_number("scaling", params->scaling, PYPS_SCALE_SAMPLES, PYPS_SCALE_NONE);
    if (!rc) rc = policy_check_number("plain_pulls", params->plain_pulls, 0, 1);
    return rc || !policy->check_params ? rc : policy->check_params(params);
}

int pyps_get_policy_needs(uint32_t number, const pyps_policy_params *params, pyps_policy_needs *out) {
    const struct policy *p = policy_find(number);
    pyps_policy_params copy;
    int rc = given(out);
    if (rc || (params && (rc = read_struct("policy_params", params, scaling, &copy)))) return rc;
    if (params) params = &copy;
    if (!p) return fail(PYPS_EPOLICY, "policy: found %u; unknown here", number);
    *out = (pyps_policy_needs){.uses_turns = p->uses_turns,
                               .checks_between_micro_batches = p->on_check || p->drops_late,
                               .needs_base_params = p->needs_base_params && p->needs_base_params(params),
                               .needs_grad_norm = p->needs_grad_norm && p->needs_grad_norm(params),
                               .resizes_batches = p->resizes_batches,
                               .allows_pipeline = !p->waits_for_round || p->overlaps_rounds,
                               .waits_for_rounds = p->waits_for_round,
                               .starts_at_once = p->starts_at_once,
                               .collects_pushes = p->stages};
    return PYPS_OK;
}
