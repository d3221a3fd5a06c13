/* pull.c: copies parameters out. A pull has each chunk whole and reports the oldest version. */
#include <string.h>

#include "store/pull.h"

int pull_record(pyps_store *s, uint64_t version) {
    s->pulled_version = version;
    if (s->role != PYPS_WORKER) return PYPS_OK;
    struct event e = store_event(s, EVENT_PULL);
    e.version = version;
    return view_commit_only(s, &e);
}

/* In a synchronous run every worker computes on the same version. */
static int round_complete(pyps_store *s) {
    if (!s->policy->waits_for_round) return PYPS_OK;
    uint64_t version;
    int rc = view_version(s, &version);
    return rc ? rc : chunks_complete(s, version);
}

struct copying {
    float *flat;
    uint64_t ticket; /* chunks that were streamed with it are there already; 0: none */
    a64 *oldest;
};

static int copy_taken(pyps_store *s, a32 *next, const void *what) {
    const struct copying *c = what;
    uint64_t word, oldest = UINT64_MAX;
    for (uint32_t chunk; (chunk = next32_relaxed(next)) < s->geometry.chunks;) {
        uint64_t version = c->ticket;
        if (!version || !has_arrived(s, chunk, version)) {
            int rc = chunk_pin(s, chunk, &word);
            if (rc) return rc;
            chunk_look(s, chunk, word_buffer(word), c->flat);
            FAILPOINT("pull.copied");
            chunk_unpin(s);
            version = word_version(word);
            if (c->ticket) chunk_arrived(s, chunk, c->ticket);
        }
        arrivals_tell(s);
        if (version < oldest) oldest = version;
    }
    min64(c->oldest, oldest);
    return PYPS_OK;
}

int chunks_copy(pyps_store *s, float *flat, uint64_t ticket, uint64_t *version_out) {
    a64 oldest = UINT64_MAX;
    struct copying copying = {flat, ticket, &oldest};
    uint32_t count = ticket ? 0 : s->geometry.chunks;
    for (uint32_t chunk = 0; ticket && chunk < s->geometry.chunks; chunk++)
        count += !has_arrived(s, chunk, ticket);
    int rc = crew_work(s, count, copy_taken, &copying);
    kernels_chosen()->copied();
    *version_out = oldest;
    return rc;
}

int pyps_pull(pyps_store *s, float *flat, uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc || (rc = require(flat)) || (rc = require(version_out))) return rc;
    uint64_t version;
    if ((rc = round_complete(s)) || (rc = lookahead_set(s)) || (rc = chunks_copy(s, flat, 0, &version)))
        return rc;
    activity_pulled(s, activity_bytes(s, PYPS_F32));
    *version_out = version;
    return pull_record(s, version);
}

/* Values of one chunk are of one version: it stays pinned from its first range to its last. */
static int copy_ranges(pyps_store *s, const pyps_range *ranges, uint64_t count, float *to, uint64_t *oldest) {
    uint64_t word = 0, whole = s->geometry.chunk_params;
    uint32_t pinned = NONE;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t end = ranges[i].first + ranges[i].count;
        for (struct run run = {.end = ranges[i].first}; run.end < end;) {
            run.first = run.end;
            uint32_t chunk = (uint32_t)(run.first / whole);
            run.end = (chunk + 1) * whole < end ? (chunk + 1) * whole : end;
            int rc = chunk == pinned ? PYPS_OK : chunk_pin(s, chunk, &word);
            if (rc) return rc;
            pinned = chunk;
            chunk_look_run(s, chunk, word_buffer(word), run, to);
            FAILPOINT("pull.copied");
            to += run.end - run.first;
            if (word_version(word) < *oldest) *oldest = word_version(word);
        }
    }
    chunk_unpin(s);
    return PYPS_OK;
}

int pyps_pull_ranges(pyps_store *s, const pyps_range *ranges, uint64_t count, float *values,
                     uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc || (rc = require(ranges)) || (rc = require(values)) || (rc = require(version_out)) ||
        (rc = ranges_check(s, "pull", ranges, count)) || (rc = round_complete(s)) || (rc = lookahead_set(s)))
        return rc;
    uint64_t oldest = UINT64_MAX, floats = 0;
    if ((rc = copy_ranges(s, ranges, count, values, &oldest))) return rc;
    for (uint64_t i = 0; i < count; i++) floats += ranges[i].count;
    activity_pulled(s, 4 * floats);
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

/* A chunk as it will be. */
static int encode(pyps_store *s, uint32_t chunk, uint32_t buffer, struct encoding *flat) {
    const float *params = chunk_params_ahead(s, chunk, buffer);
    return params ? chunk_encode(s, chunk, params, flat) : PYPS_ENOSPC;
}

int pyps_pull_encoded(pyps_store *s, uint32_t codec, void *data, uint64_t bytes, uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    uint64_t averaged = rc ? 0 : 4 * (store_elements(s) - s->trained);
    if (!rc) rc = require(version_out);
    if (!rc && bytes < averaged)
        rc = fail(PYPS_EINVAL, "pull: bytes: found %lu; expected at least %lu, of averaged tensors", bytes,
                  averaged);
    if (rc || (rc = codec_check_data("pull", codec, s->trained, data, bytes - averaged)) ||
        (rc = require(data)) || (rc = round_complete(s)) || (rc = lookahead_set(s)))
        return rc;
    struct encoding flat = {.codec = codec, .scale = 1.0f, .codes = data};
    flat.scales = (float *)(void *)(flat.codes + codec_codes(codec, s->trained));
    uint64_t word, oldest = UINT64_MAX;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !rc; chunk++) {
        if ((rc = chunk_pin(s, chunk, &word))) return rc;
        if (s->chunks[chunk].averaged)
            averaged_copy(s, chunk, word_buffer(word), (float *)(void *)(flat.codes + bytes - averaged));
        else rc = encode(s, chunk, word_buffer(word), &flat);
        chunk_unpin(s);
        if (word_version(word) < oldest) oldest = word_version(word);
    }
    *version_out = oldest;
    if (!rc) activity_pulled(s, activity_bytes(s, codec));
    return rc ? rc : pull_record(s, oldest);
}
