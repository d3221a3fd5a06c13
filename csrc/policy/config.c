/* config.c: the part of a creator's configuration that decisions depend on, checked. */
#include "policy/decisions.h"

#include <math.h>
#include <stdlib.h>

#define MAX_TURN_SECONDS 1e6

int config_read(const pyps_config *config, pyps_config *c) {
    int rc = read_struct("config", config, initial, c);
    c->policy_params.size = sizeof c->policy_params;
    return rc ? rc : policy_check(c->policy, &c->policy_params);
}

int config_check_batches(const uint32_t *batches, uint32_t count) {
    for (uint32_t r = 0; r < count; r++)
        if (batches[r]) return PYPS_OK;
    return fail(PYPS_EINVAL, "batches: found 0 for all of %u ranks; expected one of at least 1", count);
}

int config_check_ranks(const pyps_config *c) {
    if (!c->ranks || !c->batches || c->ranks > CONFIG_MAX_RANKS)
        return fail(PYPS_EINVAL, "ranks: found %u; expected 1 to %u", c->ranks, CONFIG_MAX_RANKS);
    int rc = config_check_batches(c->batches, c->ranks);
    if (rc) return rc;
    if (!isfinite(c->round_timeout_seconds) || c->round_timeout_seconds < 0 || c->round_timeout_seconds > 1e9)
        return fail(PYPS_EINVAL, "round_timeout_seconds: found %g; expected 0 to 1e9",
                    c->round_timeout_seconds);
    return PYPS_OK;
}

static int check_turn(const pyps_turn *turn, uint32_t index, uint32_t ranks, uint8_t *seen) {
    if (turn->rank >= ranks || seen[turn->rank])
        return fail(PYPS_EINVAL, "turns[%u].rank: found %u%s; expected each of 0 to %u once", index,
                    turn->rank, turn->rank < ranks ? " a second time" : "", ranks - 1);
    seen[turn->rank] = 1;
    if (!(turn->gap_seconds >= 0 && turn->gap_seconds <= MAX_TURN_SECONDS))
        return fail(PYPS_EINVAL, "turns[%u].gap_seconds: found %g; expected 0 to %g", index,
                    turn->gap_seconds, MAX_TURN_SECONDS);
    return PYPS_OK;
}

int config_check_turns(const pyps_turn *turns, uint32_t count, uint32_t ranks, double period_seconds) {
    if (!turns || count != ranks)
        return fail(PYPS_EINVAL, "turns: found %u; expected one for each of %u ranks", turns ? count : 0,
                    ranks);
    if (!(period_seconds > 0 && period_seconds <= MAX_TURN_SECONDS))
        return fail(PYPS_EINVAL, "period_seconds: found %g; expected above 0, and at most %g", period_seconds,
                    MAX_TURN_SECONDS);
    uint8_t *seen = calloc(ranks, 1);
    int rc = seen ? PYPS_OK : fail(PYPS_ENOSPC, "out of memory for %u turns", ranks);
    for (uint32_t i = 0; !rc && i < count; i++) rc = check_turn(&turns[i], i, ranks, seen);
    free(seen);
    return rc;
}

uint64_t config_round_timeout(const pyps_config *c) {
    return (uint64_t)((c->round_timeout_seconds > 0 ? c->round_timeout_seconds : 60) * 1e9);
}
