/* policy.c: the policies by number, the range of each one's numbers, and those that only scale a gradient.
 *
 * ASP: every gradient a step of its own, at once. DynSGD: the same, scaled by 1 / (staleness + 1) (Jiang,
 * Cui, Zhang, Yu: Heterogeneity-aware distributed parameter servers, SIGMOD 2017). ConSGD: scaled by 1 /
 * workers. DC-ASGD: the gradient is corrected where it is applied (apply.c), for only there are both
 * parameters known (Zheng and others: Asynchronous SGD with delay compensation, ICML 2017).
 */
#include "policy/policy.h"

#include <math.h>

#include "error.h"

static enum push_decision admit(struct view *v, const struct event *e, struct outcome *out) {
    (void)v, (void)e, (void)out;
    return PUSH_ADMIT;
}

static enum push_decision admit_by_staleness(struct view *v, const struct event *e, struct outcome *out) {
    (void)v, (void)e;
    out->scale = 1.0f / (float)(out->staleness + 1);
    return PUSH_ADMIT;
}

static enum push_decision admit_by_share(struct view *v, const struct event *e, struct outcome *out) {
    (void)e;
    out->scale = 1.0f / (float)v->active;
    return PUSH_ADMIT;
}

const struct policy policy_asp = {.name = "asp", .on_push = admit};
const struct policy policy_dynsgd = {.name = "dynsgd", .on_push = admit_by_staleness};
const struct policy policy_consgd = {.name = "consgd", .on_push = admit_by_share};
const struct policy policy_dcasgd = {.name = "dcasgd", .on_push = admit};

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

static int check_number(const char *rule, double found, double low, double high) {
    if (found >= low && found <= high) return PYPS_OK;
    return fail(PYPS_EINVAL, "policy_params: %s: found %g; expected %g to %g", rule, found, low, high);
}

int policy_check(uint32_t number, const pyps_policy_params *r) {
    int rc = PYPS_OK;
    if (!policy_find(number)) return fail(PYPS_EPOLICY, "policy: found %u; unknown here", number);
    if (number == PYPS_CUSTOM && !custom_known())
        return fail(PYPS_EPOLICY, "policy: custom: this process has set none");
    if (number == PYPS_SOFTSYNC) rc = check_number("splits", r->splits, 1, 1e6);
    if (number == PYPS_DSSP) rc = check_number("extra", r->extra, 0, 1e4);
    if (number == PYPS_DCASGD) rc = check_number("lambda_", r->lambda_, 0, 1e9);
    if (number == PYPS_SAPS) {
        rc = check_number("threshold", r->threshold, PYPS_FIXED, PYPS_RINGMASTER);
        if (!rc && r->threshold == PYPS_QUANTILE) rc = check_number("quantile", r->quantile, 0.01, 0.999);
    }
    if (number == PYPS_R2SP) {
        rc = check_number("slack", r->slack, 0, 1e6);
        if (!rc) rc = check_number("patience", r->patience, 0.1, 1e6);
    }
    return rc;
}
