/* view_samples.c: handing out sample positions, each to one member at a time.
 *
 * Positions run through all epochs, 0 .. limit. A claim is one range. What a dead, fenced or rejected member
 * held is handed out again before anything new; if the list of such ranges is full, they are counted as lost.
 */
#include "view.h"

bool samples_left(const struct view *v) { return v->returned > 0 || v->cursor < v->limit; }

void samples_take(struct view *v, uint32_t slot, uint64_t now) {
    struct member *m = view_member(v, slot);
    const struct rank *rank = view_rank(v, (uint32_t)m->rank);
    uint32_t batch = rank->share ? rank->share : rank->total.batch;
    struct range *r = view_ranges(v);
    uint64_t count;
    if (v->returned) {
        count = r->count < batch ? r->count : batch;
        m->claim_first = r->first;
        r->first += count, r->count -= count;
        if (!r->count) {
            v->returned--;
            for (uint32_t i = 0; i < v->returned; i++) r[i] = r[i + 1];
        }
    } else {
        count = v->limit - v->cursor < batch ? v->limit - v->cursor : batch;
        m->claim_first = v->cursor;
        v->cursor += count;
    }
    m->claim_count = (uint32_t)count;
    m->claim_since = now, m->begun = 0;
    v->outstanding += count > 0;
}

void samples_return(struct view *v, uint32_t slot, uint32_t keep) {
    struct member *m = view_member(v, slot);
    uint64_t count = m->claim_count - keep;
    if (m->claim_count <= keep) return;
    if (v->returned < v->ranges) {
        view_ranges(v)[v->returned++] = (struct range){m->claim_first + keep, count};
        view_rank(v, (uint32_t)m->rank)->total.returned += count;
    } else {
        v->lost += count;
    }
    m->claim_count = keep;
    v->stir++;
    v->outstanding -= keep == 0;
}
