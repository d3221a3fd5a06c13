/* config.c: the part of a creator's configuration that decisions depend on, checked. */
#include "policy/config.h"

#include <math.h>
#include <string.h>

#include "error.h"
#include "policy/policy.h"

int config_read(const pyps_config *given, pyps_config *c) {
    size_t least = offsetof(pyps_config, policy_params);
    if (given->size != sizeof *c && given->size != least)
        return fail(PYPS_EINVAL, "config: size: found %u; expected %zu", given->size, sizeof *c);
    *c = (pyps_config){0};
    memcpy(c, given, given->size);
    return policy_check(c->policy, &c->policy_params);
}

int config_check_ranks(const pyps_config *c) {
    if (!c->ranks || !c->batches || c->ranks > CONFIG_MAX_RANKS)
        return fail(PYPS_EINVAL, "ranks: found %u; expected 1 to %u", c->ranks, CONFIG_MAX_RANKS);
    for (uint32_t r = 0; r < c->ranks; r++)
        if (!c->batches[r]) return fail(PYPS_EINVAL, "batches[%u]: found 0; expected at least 1", r);
    if (!isfinite(c->round_timeout_seconds) || c->round_timeout_seconds < 0 || c->round_timeout_seconds > 1e9)
        return fail(PYPS_EINVAL, "round_timeout_seconds: found %g; expected 0 to 1e9",
                    c->round_timeout_seconds);
    return PYPS_OK;
}

uint64_t config_round_timeout(const pyps_config *c) {
    return (uint64_t)((c->round_timeout_seconds > 0 ? c->round_timeout_seconds : 60) * 1e9);
}
