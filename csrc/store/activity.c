/* activity.c: what each participant does at the moment, for observers. Nothing is decided by it.
 *
 * The words are in the participant's slot, written by it alone and relaxed: an observer may see one a moment
 * early or late. Times are nanoseconds of the machine's monotonic clock; observers get ages, which mean the
 * same on every host.
 */
#include "store/segment.h"

#define KIND_BITS 8 /* of `waits`: {since 56, kind 8} */

void activity_joined(pyps_store *s) {
    struct slot *slot = &s->slots[s->slot];
    store_relaxed(&slot->joined_at, wait_now_nanoseconds());
    store_relaxed(&slot->waits, 0), store_relaxed(&slot->waited, 0);
    store_relaxed(&slot->bytes_pushed, 0), store_relaxed(&slot->bytes_pulled, 0);
}

void activity_waits(pyps_store *s, uint32_t kind, uint64_t since) {
    store_relaxed(&s->slots[s->slot].waits, since << KIND_BITS | kind);
}

void activity_goes_on(pyps_store *s, uint64_t slept) {
    struct slot *slot = &s->slots[s->slot];
    store_relaxed(&slot->waits, 0);
    store_relaxed(&slot->waited, load_relaxed(&slot->waited) + slept);
}

uint64_t activity_bytes(const pyps_store *s, uint32_t codec) {
    uint64_t trained = 0, averaged = 0;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks; chunk++)
        *(s->chunks[chunk].averaged ? &averaged : &trained) += s->chunks[chunk].length;
    return pyps_encoded_bytes(codec, trained) + sizeof(float) * averaged;
}

void activity_pushed(pyps_store *s, uint64_t bytes) { add64_relaxed(&s->slots[s->slot].bytes_pushed, bytes); }

void activity_pulled(pyps_store *s, uint64_t bytes) { add64_relaxed(&s->slots[s->slot].bytes_pulled, bytes); }

static double age(uint64_t now, uint64_t since) {
    return since && now > since ? (double)(now - since) * 1e-9 : 0.0;
}

void activity_show(const pyps_store *s, uint32_t index, const struct member *m, pyps_member *out) {
    const struct slot *slot = &s->slots[index];
    uint64_t now = wait_now_nanoseconds(), waits = load_relaxed(&slot->waits);
    if (m->claim_count) out->claim_seconds = age(now, m->claim_since);
    if (load_acquire(&slot->id) != m->id) return; /* it has left the slot */
    out->waits_for = (uint32_t)(waits & ((1u << KIND_BITS) - 1));
    if (out->waits_for > PYPS_WAITS_ROUND) out->waits_for = PYPS_WAITS_NOT; /* a damaged segment */
    out->wait_seconds = age(now, waits >> KIND_BITS);
    out->waited_seconds = (double)load_relaxed(&slot->waited) * 1e-9;
    out->joined_seconds = age(now, load_relaxed(&slot->joined_at));
    out->bytes_pushed = load_relaxed(&slot->bytes_pushed);
    out->bytes_pulled = load_relaxed(&slot->bytes_pulled);
}
