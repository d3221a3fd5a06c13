/* view_clocks.c: the least clock of the active workers, maintained rather than searched for: it is looked for
 * again only when the last worker that had it went on, at most once for as many steps as there are workers.
 */
#include "policy/view.h"

static void find_floor(struct view *v) {
    uint64_t least = UINT64_MAX;
    v->at_floor = 0;
    for (uint32_t slot = 0; slot < v->participants; slot++) {
        const struct member *m = view_member(v, slot);
        if (m->state != PYPS_ACTIVE || m->rank < 0 || m->clock > least) continue;
        v->at_floor = m->clock < least ? 1 : v->at_floor + 1;
        least = m->clock;
    }
    if (v->at_floor) v->floor = least;
}

/* Who comes late begins beside the slowest: it holds nobody up for steps that it was not there to take. */
void clock_enters(struct view *v, struct member *m) {
    if (m->clock < v->floor) m->clock = v->floor;
    if (m->clock > v->ceiling) v->ceiling = m->clock;
    if (!v->at_floor) v->floor = m->clock;
    v->at_floor += m->clock == v->floor;
}

void clock_leaves(struct view *v, struct member *m) {
    uint32_t state = m->state;
    if (m->clock != v->floor || --v->at_floor) return;
    m->state = PYPS_LEFT;
    find_floor(v);
    m->state = state;
}

bool clock_alone(const struct view *v, const struct member *m) {
    return m->clock == v->floor && v->at_floor == 1;
}

void clock_advances(struct view *v, struct member *m) {
    uint64_t before = m->clock++;
    if (m->clock > v->ceiling) v->ceiling = m->clock;
    if (m->state == PYPS_ACTIVE && before == v->floor && !--v->at_floor) find_floor(v);
}
