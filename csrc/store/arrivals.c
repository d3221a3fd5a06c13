/* arrivals.c: tells an exchange's caller, while chunks are applied, how much of its copy is there.
 *
 * A copy that goes on to a device can begin before all of it has come. Whichever hand streams a chunk marks it
 * (`stream.marks`); the caller's thread looks at the marks between two chunks of its own, and tells of runs in ascending
 * order. A chunk that was streamed with the exchange's ticket is not written again.
 */
#include "store/apply.h"

void arrivals_begin(pyps_store *s, struct arrivals *a) {
    for (uint32_t chunk = 0; chunk < s->geometry.chunks; chunk++) store_relaxed(&s->stream.marks[chunk], 0);
    s->stream.arrivals = a->arrived ? a : NULL;
}

void chunk_arrived(const pyps_store *s, uint32_t chunk, uint64_t ticket) {
    if (s->stream.arrivals) kernels_chosen()->copied(); /* what was streamed is there before the mark is */
    store_release(&s->stream.marks[chunk], ticket);     /* partner: the acquire of has_arrived */
}

bool has_arrived(const pyps_store *s, uint32_t chunk, uint64_t ticket) {
    return load_acquire(&s->stream.marks[chunk]) == ticket;
}

static void tell(pyps_store *s, struct arrivals *a) {
    uint64_t size = s->geometry.chunk_params, first = a->told * size, count = (a->there - a->told) * size;
    a->told = a->there;
    if (count && !a->refused) a->refused = a->arrived(a->context, first, count);
}

/* A hand of the crew tells nothing: its caller's thread does. */
void arrivals_tell(pyps_store *s) {
    struct arrivals *a = s->helps ? NULL : s->stream.arrivals;
    if (!a || !s->stream.ticket) return;
    while (a->there < s->geometry.chunks && has_arrived(s, a->there, s->stream.ticket)) a->there++;
    if ((uint64_t)(a->there - a->told) * s->geometry.chunk_params >= a->least) tell(s, a);
}

int arrivals_end(pyps_store *s, bool whole) {
    struct arrivals *a = s->stream.arrivals;
    if (!a) return PYPS_OK;
    if (whole) a->there = s->geometry.chunks, tell(s, a);
    s->stream.arrivals = NULL;
    return a->refused;
}
