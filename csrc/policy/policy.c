/* policy.c: the policies by number, and what each needs. */
#include "policy/policy.h"

#define ROW(name, number) [number] = &policy_##name,
static const struct policy *const policies[] = {POLICIES(ROW)};

const struct policy *policy_find(uint32_t number) {
    return number < sizeof policies / sizeof *policies ? policies[number] : NULL;
}

int policy_check(uint32_t number, const pyps_policy_params *params) {
    const struct policy *policy = policy_find(number);
    if (!policy) return fail(PYPS_EPOLICY, "policy: found %u; unknown here", number);
    int rc = policy_check_number("scaling", params->scaling, PYPS_SCALE_SAMPLES, PYPS_SCALE_NONE);
    if (!rc) rc = policy_check_number("plain_pulls", params->plain_pulls, 0, 1);
    return rc || !policy->check_params ? rc : policy->check_params(params);
}

int pyps_get_policy_needs(uint32_t number, const pyps_policy_params *params, pyps_policy_needs *out) {
    const struct policy *p = policy_find(number);
    pyps_policy_params copy;
    int rc = require(out);
    if (rc || (params && (rc = read_struct("policy_params", params, scaling, &copy)))) return rc;
    if (params) params = &copy;
    if (!p) return fail(PYPS_EPOLICY, "policy: found %u; unknown here", number);
    *out = (pyps_policy_needs){.uses_turns = p->uses_turns,
                               .checks_between_micro_batches = p->on_check || p->drops_late,
                               .needs_grad_norm = p->needs_grad_norm && p->needs_grad_norm(params),
                               .resizes_batches = p->resizes_batches,
                               .allows_pipeline = !p->waits_for_round || p->overlaps_rounds,
                               .waits_for_rounds = p->waits_for_round,
                               .starts_at_once = p->starts_at_once,
                               .collects_pushes = p->stages};
    return PYPS_OK;
}
