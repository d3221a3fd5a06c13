/* view_parts.c: where the parts of a view are. */
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

void view_clear(struct view *v, const struct view_config *c) {
    memset(v, 0, view_bytes(c->participants, c->staging_buffers));
    v->participants = c->participants, v->staging_buffers = c->staging_buffers;
    v->tickets = c->participants * c->staging_buffers, v->max_ahead = max_ahead(c->staging_buffers);
    v->ranges = max_ranges(c->participants, c->staging_buffers);
}

bool view_sized(const struct view *v) {
    return v->tickets == v->participants * v->staging_buffers &&
           v->ranges == max_ranges(v->participants, v->staging_buffers) &&
           v->max_ahead == max_ahead(v->staging_buffers);
}

bool view_takes_part(const struct view *v, const struct member *m) {
    return m->state == PYPS_ACTIVE && m->rank >= 0 && view_rank(v, (uint32_t)m->rank)->total.batch > 0;
}
