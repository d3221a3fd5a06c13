/* pull.c: copies parameters out. A pull has each chunk whole and reports the oldest version; a strict
 * snapshot has all chunks at one version, while pushes continue. */
#include <string.h>

#include "store/store.h"

#define STREAM_BYTES (UINT64_C(16) << 20) /* a copy too large for the cache of one core bypasses it */

/* The unused end of a group's last chunk reads as zeros. */
void chunk_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t vector, float *flat) {
    uint32_t length = s->chunks[chunk].length;
    flat += (uint64_t)chunk * s->geometry.chunk_params;
    const float *from = buffer_floats(s, buffer, vector);
    if (store_elements(s) * sizeof *flat < STREAM_BYTES) memcpy(flat, from, length * sizeof *flat);
    else kernels_chosen()->stream(flat, from, length);
    memset(flat + length, 0, (s->geometry.chunk_params - length) * sizeof *flat);
}

int pull_record(pyps_store *s, uint64_t version) {
    s->pulled_version = version;
    if (s->role != PYPS_WORKER) return PYPS_OK;
    struct event e = store_event(s, EVENT_PULL);
    e.version = version;
    struct outcome outcome;
    enum verdict verdict;
    return view_commit(s, &e, &outcome, &verdict);
}

/* In a synchronous run every worker computes on the same version. */
static int round_complete(pyps_store *s) {
    if (!s->policy->waits_for_round) return PYPS_OK;
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    uint64_t version = v->version;
    view_unpin(s);
    return chunks_complete(s, version);
}

int pyps_pull(pyps_store *s, float *flat, uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    uint64_t word, oldest = UINT64_MAX;
    if ((rc = round_complete(s))) return rc;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks; chunk++) {
        if ((rc = chunk_pin(s, chunk, &word))) return rc;
        chunk_copy(s, chunk, word_buffer(word), 0, flat);
        FAILPOINT("pull.copied");
        chunk_unpin(s);
        if (word_version(word) < oldest) oldest = word_version(word);
    }
    kernels_chosen()->copied();
    activity_pulled(s, PYPS_F32);
    *version_out = oldest;
    return pull_record(s, oldest);
}

/* `to`: of the first averaged chunk */
static void averaged_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, float *to) {
    uint32_t length = s->chunks[chunk].length;
    to += (uint64_t)chunk * s->geometry.chunk_params - s->trained;
    memcpy(to, buffer_floats(s, buffer, 0), length * sizeof *to);
    memset(to + length, 0, (s->geometry.chunk_params - length) * sizeof *to);
}

int pyps_pull_encoded(pyps_store *s, uint32_t codec, void *data, uint64_t bytes, uint64_t *version_out) {
    uint64_t averaged = 4 * (store_elements(s) - s->trained);
    int rc = store_check_usable(s, true);
    if (rc ||
        (rc = codec_check_data("pull", codec, s->trained, data, bytes < averaged ? 0 : bytes - averaged)) ||
        (rc = round_complete(s)))
        return rc;
    struct encoding flat = {.codec = codec, .scale = 1.0f, .codes = data};
    flat.scales = (float *)(void *)(flat.codes + codec_codes(codec, s->trained));
    uint64_t word, oldest = UINT64_MAX;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !rc; chunk++) {
        if ((rc = chunk_pin(s, chunk, &word))) return rc;
        if (s->chunks[chunk].averaged)
            averaged_copy(s, chunk, word_buffer(word), (float *)(void *)(flat.codes + bytes - averaged));
        else rc = chunk_encode(s, chunk, buffer_floats(s, word_buffer(word), 0), &flat);
        chunk_unpin(s);
        if (word_version(word) < oldest) oldest = word_version(word);
    }
    *version_out = oldest;
    if (!rc) activity_pulled(s, codec);
    return rc ? rc : pull_record(s, oldest);
}

struct target {
    float *flat;
    float *const *state;
    uint64_t *steps;
    uint64_t snapshot, version;
};

static void copy_chunk(const pyps_store *s, uint32_t chunk, uint32_t buffer, const struct target *to) {
    chunk_copy(s, chunk, buffer, 0, to->flat);
    for (uint32_t vector = 1; to->state && vector <= s->layout.states; vector++)
        chunk_copy(s, chunk, buffer, vector, to->state[vector - 1]);
    if (to->steps) to->steps[chunk] = buffer_header(s, buffer)->steps;
    FAILPOINT("snapshot.copied");
}

/* Copies the buffer that a pusher saved. It is pinned first, and then the snapshot is seen to be still alive:
 * from then on a cancel cannot take the buffer away. */
static int copy_saved(pyps_store *s, uint32_t chunk, const struct target *to) {
    uint64_t saved = load_acquire(&s->saved[chunk]);
    uint32_t buffer = word_buffer(saved);
    if (saved_snapshot(saved) != to->snapshot || saved_state(saved) != SAVED_BUFFER ||
        buffer >= s->layout.buffer_count)
        return fail(PYPS_ESTALE, "snapshot at version %llu: cancelled", (unsigned long long)to->version);
    FAILPOINT("snapshot.found");
    store_seq(&s->slots[s->slot].chunk_hazard, buffer + UINT64_C(1));
    int rc = view_load_snapshot(s);
    if (!rc && (!s->snapshot_active || s->snapshot != to->snapshot))
        rc = fail(PYPS_ESTALE,
                  "snapshot at version %llu: cancelled, because it delayed pushes or another snapshot",
                  (unsigned long long)to->version);
    if (!rc) copy_chunk(s, chunk, buffer, to);
    chunk_unpin(s);
    return rc;
}

static int copy_present(pyps_store *s, uint32_t chunk, const struct target *to, bool *done) {
    uint64_t word;
    int rc = chunk_advance(s, chunk, to->version);
    if (rc || (rc = chunk_pin(s, chunk, &word))) return rc;
    *done = word_version(word) == to->version;
    if (*done) copy_chunk(s, chunk, word_buffer(word), to);
    chunk_unpin(s);
    return PYPS_OK;
}

static int snapshot_chunk(pyps_store *s, uint32_t chunk, const struct target *to) {
    bool done;
    int rc = copy_present(s, chunk, to, &done);
    if (!rc && !done) rc = copy_saved(s, chunk, to);
    if (rc) return rc;
    /* DONE: pushers need not save, and a saved buffer is free. The mark of a later snapshot stays. */
    uint64_t saved = load_acquire(&s->saved[chunk]);
    while (saved_snapshot(saved) <= to->snapshot &&
           !cas_seq(&s->saved[chunk], saved, saved_make(to->snapshot, SAVED_DONE, 0)))
        saved = load_acquire(&s->saved[chunk]);
    return PYPS_OK;
}

int pyps_snapshot(pyps_store *s, float *flat, float *const *state, uint64_t *steps, double timeout_seconds,
                  uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    struct event begin = store_event(s, EVENT_SNAPSHOT_BEGIN);
    struct outcome outcome, ignored;
    enum verdict verdict;
    uint64_t waited;
    if ((rc = view_commit_waiting(s, &begin, PYPS_WAITS_NOT, store_deadline(s, timeout_seconds), &outcome,
                                  &waited)))
        return rc;
    FAILPOINT("snapshot.begun");
    s->ticket.number = 0; /* the cached view is older than this snapshot */
    struct target to = {flat, state, steps, outcome.snapshot, outcome.version};
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !rc; chunk++) rc = snapshot_chunk(s, chunk, &to);
    kernels_chosen()->copied();
    struct event end = store_event(s, EVENT_SNAPSHOT_END);
    end.snapshot = outcome.snapshot;
    int ended = view_commit(s, &end, &ignored, &verdict);
    *version_out = outcome.version;
    return rc ? rc : ended;
}
