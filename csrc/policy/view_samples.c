/* view_samples.c: assigns sample positions, each to one member at a time.
 *
 * Positions run through all epochs, 0 .. limit. A claim is one range. The samples of a dead, fenced or
 * rejected member are assigned again before new ones, the first positions first; neighbours become one range. So
 * there are hardly more ranges than there were claims at one time. If the
 * list is full all the same, they are counted as dropped.
 *
 * A range with less than a rank's batch is left to ranks with smaller ones: a worker with a part of its batch waits for
 * the others of its round, and the round has fewer samples.
 */
#include <string.h>

#include "policy/view.h"

bool view_samples_left(const struct view *v) { return v->returned > 0 || v->cursor < v->limit; }

static void remove_range(struct view *v, uint32_t index) {
    struct range *r = view_ranges(v);
    v->returned--;
    memmove(&r[index], &r[index + 1], (v->returned - index) * sizeof *r);
}

bool view_samples_single(const struct view *v) {
    for (uint32_t r = 0; r < v->ranks; r++)
        if (view_rank(v, r)->total.batch == 1) return true;
    return false;
}

static uint32_t batch_of(const struct rank *rank) {
    return rank->next_batch ? rank->next_batch : rank->total.batch;
}

/* The samples of a rank's next claim if `left` are left in its range. None is left over alone unless the model can train
 * on one: the claim before takes one less, or of two one more if the rank is planned more than two. */
static uint64_t claim_size(const struct view *v, const struct rank *rank, uint64_t left) {
    uint32_t batch = batch_of(rank);
    if (left - batch != 1 || batch == 1 || view_samples_single(v)) return left < batch ? left : batch;
    if (batch > 2) return batch - 1;
    return rank->total.batch > 2 ? left : batch;
}

static bool has_smallest_batch(const struct view *v, const struct rank *rank) {
    for (uint32_t r = 0; r < v->ranks; r++) {
        const struct rank *other = view_rank(v, r);
        if (batch_of(other) < batch_of(rank) && other->slot_plus_1 &&
            view_takes_part(v, view_member(v, other->slot_plus_1 - 1)))
            return false;
    }
    return true;
}

/* The place in the list of the range that a rank's next claim is of; `returned`: of new samples. The list stays short:
 * the smallest batches take any range. */
static uint32_t range_for(const struct view *v, const struct rank *rank) {
    const struct range *r = view_ranges(v);
    if (!v->returned) return 0; /* else every claim would look at every rank */
    for (uint32_t at = 0; at < v->returned; at++)
        if (r[at].count >= batch_of(rank)) return at;
    bool any = v->cursor == v->limit || v->returned > v->participants || has_smallest_batch(v, rank);
    return any ? 0 : v->returned;
}

/* Takes the next range for a rank, of about its batch. Returns the number of samples. */
static uint32_t take(struct view *v, uint32_t slot, uint64_t *first) {
    const struct rank *rank = view_rank(v, (uint32_t)view_member(v, slot)->rank);
    uint32_t at = range_for(v, rank);
    uint64_t count;
    if (at < v->returned) {
        struct range *r = &view_ranges(v)[at];
        count = claim_size(v, rank, r->count);
        *first = r->first;
        r->first += count, r->count -= count;
        if (!r->count) remove_range(v, at);
    } else {
        count = claim_size(v, rank, v->limit - v->cursor);
        *first = v->cursor;
        v->cursor += count;
    }
    return (uint32_t)count;
}

/* Joins two neighbours into one range, which takes the earlier one's place in the list. */
static bool extend_range(struct view *v, uint64_t first, uint64_t count) {
    struct range *r = view_ranges(v);
    uint32_t at = 0, other;
    while (at < v->returned && r[at].first + r[at].count != first && r[at].first != first + count) at++;
    if (at == v->returned) return false;
    if (first < r[at].first) r[at].first = first;
    r[at].count += count;
    for (other = at + 1; other < v->returned; other++)
        if (r[at].first + r[at].count == r[other].first || r[other].first + r[other].count == r[at].first)
            break;
    if (other == v->returned) return true;
    if (r[other].first < r[at].first) r[at].first = r[other].first;
    r[at].count += r[other].count;
    remove_range(v, other);
    return true;
}

/* Before the first range of later positions. A restored list need not be in order. */
static bool insert_range(struct view *v, uint64_t first, uint64_t count) {
    struct range *r = view_ranges(v);
    uint32_t at = 0;
    if (v->returned == v->ranges) return false;
    while (at < v->returned && r[at].first < first) at++;
    memmove(&r[at + 1], &r[at], (v->returned - at) * sizeof *r);
    r[at] = (struct range){first, count};
    v->returned++;
    return true;
}

static void give_back(struct view *v, uint32_t slot, uint64_t first, uint64_t count) {
    if (extend_range(v, first, count) || insert_range(v, first, count))
        view_rank(v, (uint32_t)view_member(v, slot)->rank)->total.returned += count;
    else v->samples_dropped += count;
    v->wake_epoch++;
}

void view_samples_claim(struct view *v, uint32_t slot, uint64_t now) {
    struct member *m = view_member(v, slot);
    m->claim_count = take(v, slot, &m->claim_first);
    m->claim_since = now, m->claim_started = 0;
    v->outstanding += m->claim_count > 0;
}

void view_samples_claim_ahead(struct view *v, uint32_t slot) {
    struct range *claim = &view_ahead(v, slot)[view_member(v, slot)->ahead++];
    claim->count = take(v, slot, &claim->first);
}

bool view_samples_start_next(struct view *v, uint32_t slot, uint64_t now) {
    struct member *m = view_member(v, slot);
    struct range *ahead = view_ahead(v, slot);
    if (m->claim_count || !m->ahead) return false;
    m->claim_first = ahead[0].first, m->claim_count = (uint32_t)ahead[0].count;
    m->claim_since = now, m->claim_started = m->ahead_started > 0;
    m->ahead--, m->ahead_started -= m->claim_started;
    for (uint32_t i = 0; i < m->ahead; i++) ahead[i] = ahead[i + 1];
    v->outstanding++;
    return true;
}

void view_samples_return(struct view *v, uint32_t slot, uint32_t keep) {
    struct member *m = view_member(v, slot);
    if (m->claim_count <= keep) return;
    give_back(v, slot, m->claim_first + keep, m->claim_count - keep);
    m->claim_count = keep;
    v->outstanding -= keep == 0;
}

struct range view_samples_claimed(const struct view *v, uint32_t slot, uint32_t claim) {
    const struct member *m = view_member(v, slot);
    if (!claim) return (struct range){m->claim_first, m->claim_count};
    return claim <= m->ahead ? view_ahead(v, slot)[claim - 1] : (struct range){0, 0};
}

void view_samples_release_all(struct view *v, uint32_t slot) {
    struct member *m = view_member(v, slot);
    view_samples_return(v, slot, 0);
    const struct range *ahead = view_ahead(v, slot);
    for (uint32_t i = 0; i < m->ahead; i++) give_back(v, slot, ahead[i].first, ahead[i].count);
    m->ahead = m->ahead_started = m->wants_ahead = 0;
}
