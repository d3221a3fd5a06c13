/* view_clocks.c: the least clock of the active workers, kept up to date. It is searched for only when the
 * last worker at the minimum advances: at most once in as many steps as there are workers.
 */
#include "policy/view.h"

void view_clock_find_min(struct view *v) {
    uint64_t least = UINT64_MAX;
    v->at_min_clock = 0;
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        const struct member *m = view_member(v, slot);
        if (!view_takes_part(v, m) || m->clock > least) continue;
        v->at_min_clock = m->clock < least ? 1 : v->at_min_clock + 1;
        least = m->clock;
    }
    if (v->at_min_clock) v->min_clock = least;
}

/* A worker that joins late starts at the slowest worker's clock, so that no other has to wait for it. Until
 * all have joined no step starts, and the least clock is that of a restored state. */
void view_clock_enter(struct view *v, struct member *m) {
    if (m->clock < v->min_clock) m->clock = v->min_clock;
    if (m->clock > v->max_clock) v->max_clock = m->clock;
    if (!v->all_joined) return;
    if (!v->at_min_clock) v->min_clock = m->clock;
    v->at_min_clock += m->clock == v->min_clock;
}

void view_clock_leave(struct view *v, struct member *m) {
    uint32_t state = m->state;
    if (!v->all_joined || m->clock != v->min_clock || --v->at_min_clock) return;
    m->state = PYPS_LEFT;
    view_clock_find_min(v);
    m->state = state;
}

uint64_t view_clock_min_after(const struct view *v, const struct member *m, uint64_t clock) {
    if (m->clock != v->min_clock || v->at_min_clock > 1) return v->min_clock;
    uint64_t least = clock; /* this member alone is at the minimum */
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        const struct member *other = view_member(v, slot);
        if (other == m || !view_takes_part(v, other)) continue;
        if (other->clock < least) least = other->clock;
    }
    return least;
}

void view_clock_advance(struct view *v, struct member *m) {
    uint64_t before = m->clock++;
    if (m->clock > v->max_clock) v->max_clock = m->clock;
    if (view_takes_part(v, m) && before == v->min_clock && !--v->at_min_clock) view_clock_find_min(v);
}
