/* view_parts.c: where the parts of a view are, a new view, and whether one that another process wrote is possible. */
#include <string.h>

#include "policy/view.h"

struct view_offsets {
    size_t members, tickets, sources, pending, ranges, ahead, ranks, bytes;
};

/* Each staging buffer holds the gradient of one step that is computed or sent: one of them the current one. */
static uint32_t max_ahead(uint32_t staging_buffers) { return staging_buffers > 2 ? staging_buffers - 1 : 1; }

/* Each claim of each member may come back in two parts. */
static uint32_t max_ranges(uint32_t participants, uint32_t staging_buffers) {
    return 2 * (1 + max_ahead(staging_buffers)) * participants;
}

static struct view_offsets offsets(uint32_t participants, uint32_t staging_buffers) {
    struct view_offsets p;
    p.members = sizeof(struct view);
    p.tickets = p.members + participants * sizeof(struct member);
    p.sources = p.tickets + (size_t)participants * staging_buffers * sizeof(struct ticket);
    p.pending = p.sources + participants * sizeof(struct source);
    p.ranges = p.pending + participants * sizeof(struct source);
    p.ahead = p.ranges + max_ranges(participants, staging_buffers) * sizeof(struct range);
    p.ranks = p.ahead + (size_t)participants * max_ahead(staging_buffers) * sizeof(struct range);
    p.bytes = p.ranks + participants * sizeof(struct rank);
    return p;
}

static void *at(const struct view *v, size_t offset) { return (char *)(uintptr_t)v + offset; }
static struct view_offsets offsets_of(const struct view *v) {
    return offsets(v->participants, v->staging_buffers);
}

size_t view_bytes(uint32_t participants, uint32_t staging_buffers) {
    return offsets(participants, staging_buffers).bytes;
}
size_t view_used_bytes(const struct view *v) { return offsets_of(v).ranks + v->ranks * sizeof(struct rank); }
struct member *view_member(const struct view *v, uint32_t slot) {
    return (struct member *)at(v, offsets_of(v).members) + slot;
}
struct rank *view_rank(const struct view *v, uint32_t rank) {
    return (struct rank *)at(v, offsets_of(v).ranks) + rank;
}
struct ticket *view_ticket(const struct view *v, uint64_t number) {
    return (struct ticket *)at(v, offsets_of(v).tickets) + number % v->tickets;
}
struct source *view_sources(const struct view *v) { return at(v, offsets_of(v).sources); }
struct source *view_pending(const struct view *v) { return at(v, offsets_of(v).pending); }
struct range *view_ranges(const struct view *v) { return at(v, offsets_of(v).ranges); }
struct range *view_ahead(const struct view *v, uint32_t slot) {
    return (struct range *)at(v, offsets_of(v).ahead) + (size_t)slot * v->max_ahead;
}

void view_init(struct view *v, const struct view_config *c) {
    memset(v, 0, view_bytes(c->participants, c->staging_buffers));
    v->participants = c->participants, v->ranks = c->ranks, v->staging_buffers = c->staging_buffers;
    v->policy = c->policy, v->policy_params = c->policy_params;
    v->tickets = c->participants * c->staging_buffers, v->max_ahead = max_ahead(c->staging_buffers);
    v->ranges = max_ranges(c->participants, c->staging_buffers);
    v->limit = c->samples, v->round_timeout = c->round_timeout;
    for (uint32_t slot = 0; slot < v->participants; slot++) view_member(v, slot)->rank = -1;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        rank->total.batch = c->batches[r];
        rank->turn_place = rank->turn_rank = r;
    }
}

bool view_sized(const struct view *v) {
    return v->tickets == v->participants * v->staging_buffers &&
           v->ranges == max_ranges(v->participants, v->staging_buffers) &&
           v->max_ahead == max_ahead(v->staging_buffers);
}

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
        if (!source_valid(v, &view_pending(v)[i])) return false;
    uint32_t residuals = RESIDUALS_A_SLOT * v->participants;
    for (uint32_t r = 0; r < count; r++) {
        uint32_t slot_plus_1 = ranks[r].slot_plus_1;
        if (ranks[r].residual > residuals || ranks[r].version_residual > residuals ||
            ranks[r].held_residual > residuals)
            return false;
        if (slot_plus_1 > v->participants) return false;
        if (slot_plus_1 && members[slot_plus_1 - 1].rank != (int32_t)r) return false;
        if (ranks[r].turn_rank >= count || ranks[ranks[r].turn_rank].turn_place != r) return false;
    }
    for (uint32_t t = 0; t < v->tickets; t++)
        if (tickets[t].slot >= v->participants || tickets[t].staging >= v->staging_buffers) return false;
    return true;
}

bool view_takes_part(const struct view *v, const struct member *m) {
    return m->state == PYPS_ACTIVE && m->rank >= 0 && view_rank(v, (uint32_t)m->rank)->total.batch > 0;
}
