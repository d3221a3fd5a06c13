/* view_valid.c: whether a view that another process wrote is possible. */
#include <string.h>

#include "policy/decisions.h"

static bool source_valid(const struct view *v, const struct source *source) {
    return source->slot < v->participants && source->staging < v->staging_buffers;
}

bool view_valid(const struct view *v, const struct view *expected) {
    if (v->participants != expected->participants || v->staging_buffers != expected->staging_buffers ||
        v->tickets != expected->tickets || v->ranges != expected->ranges ||
        v->max_ahead != expected->max_ahead || v->policy != expected->policy ||
        memcmp(&v->policy_params, &expected->policy_params, sizeof v->policy_params) != 0)
        return false;
    const uint32_t count = v->ranks; /* read once: another process may damage it meanwhile */
    if (count < expected->ranks || count > expected->participants) return false;
    if (v->returned > v->ranges || v->round_sources > v->participants || v->staged > v->participants ||
        v->snapshot_slot >= v->participants)
        return false;
    const struct member *members = view_member(v, 0);
    const struct rank *ranks = view_rank(v, 0);
    const struct ticket *tickets = view_ticket(v, 0);
    for (uint32_t i = 0; i < v->participants; i++) {
        const struct member *m = &members[i];
        if (m->rank < -1 || m->rank >= (int32_t)count) return false;
        bool works = m->role == PYPS_WORKER && m->state != PYPS_EMPTY;
        if (m->ahead > v->max_ahead || m->ahead_started > m->ahead || m->wants_ahead > v->max_ahead)
            return false;
        if (m->rank < 0 && (works || m->claim_count || m->ahead || m->staged)) return false;
    }
    for (uint32_t i = 0; i < v->round_sources; i++)
        if (!source_valid(v, &view_sources(v)[i])) return false;
    for (uint32_t i = 0; i < v->staged; i++)
        if (!source_valid(v, &view_pending(v)[i]) || members[view_pending(v)[i].slot].rank < 0) return false;
    uint32_t residuals = RESIDUALS_A_SLOT * v->participants;
    for (uint32_t r = 0; r < count; r++) {
        uint32_t slot_plus_1 = ranks[r].slot_plus_1;
        if (ranks[r].residual > residuals || ranks[r].version_residual > residuals ||
            ranks[r].held_residual > residuals)
            return false;
        if (slot_plus_1 > v->participants) return false;
        if (slot_plus_1 && members[slot_plus_1 - 1].rank != (int32_t)r) return false;
    }
    const struct policy *policy = policy_find(expected->policy);
    if (policy->valid && !policy->valid(v, count)) return false;
    for (uint32_t t = 0; t < v->tickets; t++)
        if (tickets[t].slot >= v->participants || tickets[t].staging >= v->staging_buffers) return false;
    return true;
}
