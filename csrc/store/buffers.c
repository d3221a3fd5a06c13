/* buffers.c: how a buffer changes hands.
 *
 * Every chunk buffer and every view buffer has an owner word {generation, holder, chunk}.
 *
 *   claim     free -> held       CAS {g, none, c} to {g + 1, me, c'}, after it was seen to be free
 *   publish   held -> published  a CAS on the chunk's word names it; then the owner word says none again
 *   displace  published -> free  nothing is written: the chunk's word now names another buffer
 *
 * "Free" is a scan, not a flag: no participant holds the buffer, the word of the chunk that it was last
 * claimed for does not name it, no live snapshot saves it, and no hazard names it. The generation makes scan
 * and claim one step: if another participant claims the buffer in between, the CAS fails, and without a claim
 * it cannot have been published again. The owner word carries the chunk. So a holder that dies between the
 * two writes of "publish" leaves nothing to guess: its holder field is cleared, and the chunk's word says
 * whether the buffer is in use.
 */
#include "store/store.h"

/* Two view buffers are free at any moment, but other ones by the time that a scan reaches them. */
#define VIEW_SCANS 1000u

uint8_t *buffer_halves(const pyps_store *s, uint32_t buffer) {
    return s->base + s->layout.buffers + buffer * s->layout.buffer_stride + sizeof(struct chunk_header);
}

float *buffer_floats(const pyps_store *s, uint32_t buffer, uint32_t vector) {
    uint8_t *start = buffer_halves(s, buffer);
    if (vector) start += s->layout.buffer_states + (vector - 1) * 4 * (size_t)s->geometry.chunk_params;
    return (float *)(void *)start;
}

const float *buffer_params(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t first,
                           size_t length, float *block) {
    if (!chunk_has_halves(s, chunk)) return buffer_floats(s, buffer, 0) + first;
    kernels_chosen()->decode(PYPS_BF16, block, buffer_halves(s, buffer) + 2 * (size_t)first, NULL, length);
    return block;
}

struct chunk_header *buffer_header(const pyps_store *s, uint32_t buffer) {
    return (struct chunk_header *)(void *)(s->base + s->layout.buffers + buffer * s->layout.buffer_stride);
}

static bool hazarded(const pyps_store *s, size_t field, uint64_t value) {
    for (uint32_t slot = 0; slot < s->geometry.max_participants; slot++) {
        const a64 *hazard = (const a64 *)(const void *)((const char *)&s->slots[slot] + field);
        if (load_seq(hazard) == value) return true; /* W2 of atomics.h; W1 is the caller's */
    }
    return false;
}

bool staging_has_reader(const pyps_store *s, uint64_t ticket) {
    return hazarded(s, offsetof(struct slot, ticket_hazard), ticket);
}

bool residual_has_reader(const pyps_store *s, uint32_t residual) {
    return hazarded(s, offsetof(struct slot, residual_hazard), residual);
}

/* Does a snapshot that may still be read save this buffer? A later snapshot than this handle has seen counts
 * as alive. */
static bool saved_alive(pyps_store *s, uint32_t chunk, uint32_t buffer) {
    uint64_t saved = load_acquire(&s->saved[chunk]);
    if (saved_state(saved) != SAVED_BUFFER || word_buffer(saved) != buffer) return false;
    if (view_load_snapshot(s)) return true;
    return saved_snapshot(saved) > s->snapshot ||
           (saved_snapshot(saved) == s->snapshot && s->snapshot_active);
}

static bool try_claim(pyps_store *s, uint32_t buffer, uint32_t chunk) {
    uint64_t owner = load_acquire(&s->owners[buffer]); /* pairs with the release in buffer_published */
    if (owner_holder(owner) != HOLDER_NONE) return false;
    uint32_t last = owner_chunk(owner);
    if (last < s->geometry.chunks) {
        if (word_buffer(load_seq(&s->words[last])) == buffer) return false; /* W1 */
        if (saved_alive(s, last, buffer)) return false;
    }
    if (hazarded(s, offsetof(struct slot, chunk_hazard), buffer + UINT64_C(1))) return false;
    FAILPOINT("claim.scanned");
    return cas_seq(&s->owners[buffer], owner, owner_make(owner_generation(owner) + 1, holder_of(s), chunk));
}

/* Tries the buffer that was displaced last first: it is still in cache. */
static uint32_t find_free(pyps_store *s, uint32_t chunk) {
    for (size_t i = sizeof s->free_cache / sizeof *s->free_cache; i-- > 0;) {
        uint32_t candidate = s->free_cache[i];
        s->free_cache[i] = NONE;
        if (candidate != NONE && try_claim(s, candidate, chunk)) return candidate;
    }
    for (uint32_t i = 0; i < s->layout.buffer_count; i++) {
        uint32_t buffer = (s->scan + i) % s->layout.buffer_count;
        if (!try_claim(s, buffer, chunk)) continue;
        s->scan = buffer + 1;
        return buffer;
    }
    return NONE;
}

/* Spares run out only while a snapshot holds many. Its reader frees them one by one. If that takes longer
 * than the grace period, the reader may be stopped, and the snapshot is cancelled. Meanwhile what the dead hold is released. */
static int wait_for_spare(pyps_store *s, uint32_t chunk) {
    uint64_t deadline = wait_deadline_after(SNAPSHOT_GRACE_SECONDS);
    while ((s->private_buffer = find_free(s, chunk)) == NONE) {
        slots_release_dead(s);
        if (wait_now_nanoseconds() < deadline) {
            wait_on_word(&s->header->progress, load32_acquire(&s->header->progress), STALL_NANOSECONDS);
            continue;
        }
        int rc = view_load_snapshot(s);
        if (rc) return rc;
        if (!s->snapshot_active)
            return fail(PYPS_EFULL, "no free buffer for chunk %u: %u are held; the segment may be damaged",
                        chunk, s->layout.buffer_count - s->geometry.chunks);
        if ((rc = snapshot_cancel(s, s->snapshot))) return rc;
        deadline = wait_deadline_after(SNAPSHOT_GRACE_SECONDS);
    }
    return PYPS_OK;
}

int buffer_claim(pyps_store *s, uint32_t chunk) {
    if (s->private_buffer != NONE) {
        /* Left from a lost CAS: give it the new chunk before it can be published there. */
        uint64_t owner = load_relaxed(&s->owners[s->private_buffer]);
        if (owner_chunk(owner) != chunk)
            store_seq(&s->owners[s->private_buffer],
                      owner_make(owner_generation(owner), holder_of(s), chunk));
        return PYPS_OK;
    }
    s->private_buffer = find_free(s, chunk);
    return s->private_buffer != NONE ? PYPS_OK : wait_for_spare(s, chunk);
}

static void release(a64 *owner_word, uint32_t holder) {
    uint64_t owner = load_acquire(owner_word);
    if (owner_holder(owner) == holder)
        cas_seq(owner_word, owner, owner_make(owner_generation(owner), HOLDER_NONE, owner_chunk(owner)));
}

void buffer_published(pyps_store *s, uint32_t displaced) {
    FAILPOINT("publish.unreleased");
    release(&s->owners[s->private_buffer], holder_of(s)); /* release: the word's CAS is visible first */
    s->private_buffer = NONE;
    for (size_t i = 1; i < sizeof s->free_cache / sizeof *s->free_cache; i++)
        s->free_cache[i - 1] = s->free_cache[i];
    s->free_cache[sizeof s->free_cache / sizeof *s->free_cache - 1] = displaced;
}

void buffers_release(pyps_store *s, uint32_t holder) {
    for (uint32_t b = 0; b < s->layout.buffer_count; b++) release(&s->owners[b], holder);
    for (uint32_t v = 0; v < s->layout.view_count; v++) release(&s->view_owners[v], holder);
}

int view_buffer_claim(pyps_store *s) {
    if (s->private_view != NONE) return PYPS_OK;
    for (uint32_t i = 0; i < VIEW_SCANS * s->layout.view_count; i++) {
        uint32_t buffer = (s->view_scan + i) % s->layout.view_count;
        uint64_t owner = load_acquire(&s->view_owners[buffer]);
        if (owner_holder(owner) != HOLDER_NONE) continue;
        if (word_buffer(load_seq(&s->header->view)) == buffer) continue; /* W1 */
        if (hazarded(s, offsetof(struct slot, view_hazard), buffer + UINT64_C(1))) continue;
        FAILPOINT("view.scanned");
        if (!cas_seq(&s->view_owners[buffer], owner,
                     owner_make(owner_generation(owner) + 1, holder_of(s), 0)))
            continue;
        s->private_view = buffer;
        s->view_scan = buffer + 1;
        return PYPS_OK;
    }
    return fail(PYPS_EFULL, "no free view buffer among %u; the segment may be damaged", s->layout.view_count);
}

void view_buffer_published(pyps_store *s) {
    FAILPOINT("view.unreleased");
    release(&s->view_owners[s->private_view], holder_of(s));
    s->private_view = NONE;
}

int chunk_pin(pyps_store *s, uint32_t chunk, uint64_t *word_out) {
    a64 *hazard = &s->slots[s->slot].chunk_hazard;
    for (;;) {
        uint64_t word = load_acquire(&s->words[chunk]);
        uint32_t buffer = word_buffer(word);
        if (buffer >= s->layout.buffer_count)
            return fail(PYPS_ECORRUPT, "chunk %u: found buffer %u; the segment has %u", chunk, buffer,
                        s->layout.buffer_count);
        store_seq(hazard, buffer + UINT64_C(1)); /* R1 of atomics.h */
        FAILPOINT("pin.hazard");
        if (load_seq(&s->words[chunk]) == word) { /* R2 */
            *word_out = word;
            return PYPS_OK;
        }
    }
}

/* Release: the copy made under the hazard ends before another participant can claim the buffer. */
void chunk_unpin(pyps_store *s) { store_release(&s->slots[s->slot].chunk_hazard, 0); }
