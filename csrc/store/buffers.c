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
#include "store/buffers.h"

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
    if (buffer_has_reader(s, buffer)) return false;
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
        if ((rc = snapshot_end(s, EVENT_SNAPSHOT_CANCEL, s->snapshot))) return rc;
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

void buffer_published(pyps_store *s, uint32_t displaced) {
    FAILPOINT("publish.unreleased");
    owner_release(&s->owners[s->private_buffer], holder_of(s)); /* release: the word's CAS is visible first */
    s->private_buffer = NONE;
    for (size_t i = 1; i < sizeof s->free_cache / sizeof *s->free_cache; i++)
        s->free_cache[i - 1] = s->free_cache[i];
    s->free_cache[sizeof s->free_cache / sizeof *s->free_cache - 1] = displaced;
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

void wake_progress(pyps_store *s) {
    if (!load32_seq(&s->header->progress_waiters)) return;
    add32_seq(&s->header->progress, 1);
    wait_was_announced(&s->header->progress_waiters, &s->header->progress);
    wait_wake_all(&s->header->progress);
}

bool wait_for_word(pyps_store *s, const a64 *word, uint64_t least) {
    bool moved;
    FAILPOINT("apply.waits");
    uint64_t deadline = wait_now_nanoseconds() + STALL_NANOSECONDS;
    for (;;) {
        uint32_t seen = load32_seq(&s->header->progress);
        uint64_t now = wait_now_nanoseconds();
        wait_announce(&s->header->progress_waiters, seen);
        moved = load_seq(word) >= least;
        if (moved || now >= deadline) break;
        wait_on_word(&s->header->progress, seen, deadline - now);
    }
    return moved;
}
