/* pull.c: copies parameters out. A pull has each chunk whole and reports the oldest version. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "store/store.h"

#define STREAM_BYTES (UINT64_C(16) << 20) /* a copy too large for the cache of one core bypasses it */
#define BLOCK        1024u                /* floats of a gradient that are decoded at a time, as in apply.c */

/* The unused end of a group's last chunk reads as zeros. */
void chunk_put(const pyps_store *s, uint32_t chunk, const float *from, float *flat) {
    uint32_t length = s->chunks[chunk].length;
    flat += (uint64_t)chunk * s->geometry.chunk_params;
    if (store_elements(s) * sizeof *flat < STREAM_BYTES) memcpy(flat, from, length * sizeof *flat);
    else kernels_chosen()->stream(flat, from, length);
    memset(flat + length, 0, (s->geometry.chunk_params - length) * sizeof *flat);
}

void chunk_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t vector, float *flat) {
    chunk_put(s, chunk, buffer_floats(s, buffer, vector), flat);
}

int lookahead_set(pyps_store *s) {
    uint64_t word;
    s->lookahead = 0;
    if (s->role != PYPS_WORKER || !kernels_chosen()->look[s->geometry.optimizer]) return PYPS_OK;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    bool valid = view_valid(v, s->expected);
    if (valid) s->lookahead = view_lookahead(v, s->slot);
    view_unpin(s);
    return valid ? PYPS_OK : fail(PYPS_ECORRUPT, "the view is damaged");
}

/* How to write a chunk's parameters as they will be; false: it is pulled as it is. */
static bool look_at(const pyps_store *s, uint32_t chunk, uint32_t buffer, struct look *l) {
    const struct chunk_header *header = buffer_header(s, buffer);
    unsigned optimizer = s->geometry.optimizer;
    if (!(s->lookahead > 0) || s->chunks[chunk].averaged) return false;
    *l = (struct look){.length = s->chunks[chunk].length};
    l->ahead = kernels_ahead(optimizer, &header->hyper, header->steps, s->lookahead);
    for (uint32_t vector = 0; vector <= s->layout.states; vector++)
        l->from[vector] = buffer_floats(s, buffer, vector);
    return l->ahead.carried > 0;
}

/* With the worker's own last gradient from `at` of the flat vector, decoded from the beginning of a block, and a block
 * at a time. */
static void look_along(const pyps_store *s, uint32_t chunk, uint64_t at, struct look l) {
    uint32_t staging = s->own.staging, codec = s->own.ticket ? staging_codec(s, s->slot, staging) : PYPS_F32;
    size_t length = l.length;
    const pyps_hyper *pushed = &staging_header(s, s->slot, staging)->hyper[s->chunks[chunk].group];
    l.scale = s->own.scale, l.clip = pushed->clip > 0 ? pushed->clip : INFINITY;
    if (pushed->clip_norm > 0) l.scale *= norm_factor(s->own.norm, pushed->clip_norm);
    for (size_t from = 0; from < length; from += l.length) {
        float block[BLOCK];
        size_t before = codec == PYPS_F32 ? 0 : (at + from) % BLOCK;
        size_t at_a_time = codec == PYPS_F32 ? length : BLOCK - before;
        l.length = length - from < at_a_time ? length - from : at_a_time;
        if (s->own.ticket)
            l.gradient = before + staging_gradient(s, s->slot, staging, codec, at + from - before,
                                                   before + l.length, block);
        kernels_chosen()->look[s->geometry.optimizer](&l);
        l.to += l.length;
        for (uint32_t vector = 0; vector <= s->layout.states; vector++) l.from[vector] += l.length;
    }
}

void chunk_look(const pyps_store *s, uint32_t chunk, uint32_t buffer, float *flat) {
    struct look l;
    if (!look_at(s, chunk, buffer, &l)) {
        chunk_copy(s, chunk, buffer, 0, flat);
        return;
    }
    l.to = flat + (uint64_t)chunk * s->geometry.chunk_params;
    l.streams = store_elements(s) * sizeof *flat >= STREAM_BYTES && (uintptr_t)l.to % 16 == 0;
    look_along(s, chunk, (uint64_t)chunk * s->geometry.chunk_params, l);
    memset(l.to + l.length, 0, (s->geometry.chunk_params - l.length) * sizeof *flat);
}

/* Encodes a chunk as it will be. */
static int encode_ahead(pyps_store *s, uint32_t chunk, uint32_t buffer, struct encoding *flat) {
    struct look l;
    if (!look_at(s, chunk, buffer, &l)) return chunk_encode(s, chunk, buffer_floats(s, buffer, 0), flat);
    if (!s->ahead) s->ahead = malloc(s->geometry.chunk_params * sizeof *s->ahead);
    if (!s->ahead) return fail(PYPS_ENOSPC, "out of memory for %u parameters", s->geometry.chunk_params);
    l.to = s->ahead;
    look_along(s, chunk, (uint64_t)chunk * s->geometry.chunk_params, l);
    return chunk_encode(s, chunk, s->ahead, flat);
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
    if (!rc) rc = given(flat);
    if (!rc) rc = given(version_out);
    if (rc) return rc;
    uint64_t word, oldest = UINT64_MAX;
    if ((rc = round_complete(s)) || (rc = lookahead_set(s))) return rc;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks; chunk++) {
        if ((rc = chunk_pin(s, chunk, &word))) return rc;
        chunk_look(s, chunk, word_buffer(word), flat);
        FAILPOINT("pull.copied");
        chunk_unpin(s);
        if (word_version(word) < oldest) oldest = word_version(word);
    }
    kernels_chosen()->copied();
    activity_pulled(s, 4 * store_elements(s));
    *version_out = oldest;
    return pull_record(s, oldest);
}

/* Of a chunk, without its unused end. */
static void look_run(const pyps_store *s, uint32_t chunk, uint32_t buffer, struct run run, float *to) {
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params, end = at + s->chunks[chunk].length;
    uint64_t used = run.first < end ? (run.end < end ? run.end : end) - run.first : 0;
    struct look l;
    memset(to + used, 0, (run.end - run.first - used) * sizeof *to);
    if (!look_at(s, chunk, buffer, &l)) {
        memcpy(to, buffer_floats(s, buffer, 0) + (run.first - at), used * sizeof *to);
        return;
    }
    for (uint32_t vector = 0; vector <= s->layout.states; vector++) l.from[vector] += run.first - at;
    l.to = to, l.length = used;
    look_along(s, chunk, run.first, l);
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
            look_run(s, chunk, word_buffer(word), run, to);
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
    if (rc || (rc = given(ranges)) || (rc = given(values)) || (rc = given(version_out)) ||
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

int pyps_pull_encoded(pyps_store *s, uint32_t codec, void *data, uint64_t bytes, uint64_t *version_out) {
    uint64_t averaged = 4 * (store_elements(s) - s->trained);
    int rc = store_check_usable(s, true);
    if (!rc) rc = given(version_out);
    if (rc ||
        (rc = codec_check_data("pull", codec, s->trained, data, bytes < averaged ? 0 : bytes - averaged)) ||
        (rc = round_complete(s)) || (rc = lookahead_set(s)))
        return rc;
    struct encoding flat = {.codec = codec, .scale = 1.0f, .codes = data};
    flat.scales = (float *)(void *)(flat.codes + codec_codes(codec, s->trained));
    uint64_t word, oldest = UINT64_MAX;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !rc; chunk++) {
        if ((rc = chunk_pin(s, chunk, &word))) return rc;
        if (s->chunks[chunk].averaged)
            averaged_copy(s, chunk, word_buffer(word), (float *)(void *)(flat.codes + bytes - averaged));
        else rc = encode_ahead(s, chunk, word_buffer(word), &flat);
        chunk_unpin(s);
        if (word_version(word) < oldest) oldest = word_version(word);
    }
    *version_out = oldest;
    if (!rc) activity_pulled(s, pyps_encoded_bytes(codec, store_elements(s)));
    return rc ? rc : pull_record(s, oldest);
}
