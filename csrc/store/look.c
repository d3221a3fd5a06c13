/* look.c: copies a chunk out of its buffer, as it is or as it will be. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "store/gradients.h"

#define STREAM_BYTES (UINT64_C(16) << 20) /* a copy too large for the cache of one core bypasses it */

static bool copies_stream(const pyps_store *s) { return store_elements(s) * sizeof(float) >= STREAM_BYTES; }

/* `flat` from the chunk on: its unused end reads as zeros. */
static void put_end(const pyps_store *s, uint32_t length, float *flat) {
    memset(flat + length, 0, (s->geometry.chunk_params - length) * sizeof *flat);
}

void chunk_put(const pyps_store *s, uint32_t chunk, const float *from, float *flat) {
    uint32_t length = s->chunks[chunk].length;
    flat += (uint64_t)chunk * s->geometry.chunk_params;
    if (copies_stream(s)) kernels_chosen()->stream(flat, from, length);
    else memcpy(flat, from, length * sizeof *flat);
    put_end(s, length, flat);
}

static void widen(const pyps_store *s, uint32_t chunk, uint32_t buffer, float *flat) {
    uint32_t length = s->chunks[chunk].length;
    flat += (uint64_t)chunk * s->geometry.chunk_params;
    if (!copies_stream(s)) buffer_params(s, chunk, buffer, 0, length, flat);
    for (uint32_t at = 0, count; at < length && copies_stream(s); at += count) {
        float block[BLOCK];
        count = length - at < BLOCK ? length - at : BLOCK;
        kernels_chosen()->stream(flat + at, buffer_params(s, chunk, buffer, at, count, block), count);
    }
    put_end(s, length, flat);
}

void chunk_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t vector, float *flat) {
    if (vector > chunk_states(s, chunk)) put_end(s, 0, flat + (uint64_t)chunk * s->geometry.chunk_params);
    else if (!vector && chunk_has_halves(s, chunk)) widen(s, chunk, buffer, flat);
    else chunk_put(s, chunk, buffer_floats(s, buffer, vector), flat);
}

static bool has_scratch(pyps_store *s) {
    if (!s->chunk_floats) s->chunk_floats = malloc(s->geometry.chunk_params * sizeof *s->chunk_floats);
    if (!s->chunk_floats) fail(PYPS_ENOSPC, "out of memory for %u parameters", s->geometry.chunk_params);
    return s->chunk_floats;
}

const float *chunk_params(pyps_store *s, uint32_t chunk, uint32_t buffer) {
    if (chunk_has_halves(s, chunk) && !has_scratch(s)) return NULL;
    return buffer_params(s, chunk, buffer, 0, s->chunks[chunk].length, s->chunk_floats);
}

int lookahead_set(pyps_store *s) {
    s->lookahead = 0;
    if (s->role != PYPS_WORKER || !kernels_chosen()->look[s->geometry.optimizer]) return PYPS_OK;
    uint64_t word;
    int rc = view_draft(s, &word);
    if (!rc) s->lookahead = view_lookahead(s->draft, s->slot);
    return rc;
}

/* How to write a chunk's parameters as they will be; false: it is pulled as it is. */
static bool look_at(const pyps_store *s, uint32_t chunk, uint32_t buffer, struct look *l) {
    const struct chunk_header *header = buffer_header(s, buffer);
    unsigned optimizer = s->geometry.optimizer;
    if (!(s->lookahead > 0) || s->chunks[chunk].averaged) return false;
    *l = (struct look){.length = s->chunks[chunk].length};
    l->ahead =
        kernels_ahead(optimizer, &header->hyper, header->steps, s->lookahead, s->policy->waits_for_round);
    for (uint32_t vector = 1; vector <= s->layout.states; vector++)
        l->from[vector] = buffer_floats(s, buffer, vector);
    return l->ahead.carried > 0;
}

/* With the worker's own last gradient from `at` of the flat vector. A gradient is decoded, and parameters are widened,
 * from the beginning of a block and a block at a time. */
static void look_along(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint64_t at, struct look l) {
    uint32_t staging = s->own.staging, slot = worker_slot(s);
    uint32_t codec = s->own.ticket ? staging_codec(s, slot, staging) : PYPS_F32;
    uint32_t first = (uint32_t)(at % s->geometry.chunk_params);
    bool whole = codec == PYPS_F32 && !chunk_has_halves(s, chunk);
    const fenv_t callers = kernels_enter();
    size_t length = l.length;
    const pyps_hyper *pushed = &staging_header(s, slot, staging)->hyper[s->chunks[chunk].group];
    l.scale = s->own.scale, l.clip = pushed->clip > 0 ? pushed->clip : INFINITY;
    if (pushed->clip_norm > 0) l.scale *= norm_factor(s->own.norm, pushed->clip_norm);
    for (size_t from = 0; from < length; from += l.length) {
        float block[BLOCK], params[BLOCK];
        size_t before = whole ? 0 : (at + from) % BLOCK, at_a_time = whole ? length : BLOCK - before;
        l.length = length - from < at_a_time ? length - from : at_a_time;
        l.from[0] = buffer_params(s, chunk, buffer, first + (uint32_t)from, l.length, params);
        if (s->own.ticket)
            l.gradient = before + staging_gradient(s, slot, staging, codec, at + from - before,
                                                   before + l.length, block);
        kernels_chosen()->look[s->geometry.optimizer](&l);
        l.to += l.length;
        for (uint32_t vector = 1; vector <= s->layout.states; vector++) l.from[vector] += l.length;
    }
    kernels_leave(&callers);
}

void chunk_look(const pyps_store *s, uint32_t chunk, uint32_t buffer, float *flat) {
    struct look l;
    if (!look_at(s, chunk, buffer, &l)) {
        chunk_copy(s, chunk, buffer, 0, flat);
        return;
    }
    l.to = flat + (uint64_t)chunk * s->geometry.chunk_params;
    l.streams = copies_stream(s) && (uintptr_t)l.to % 16 == 0;
    look_along(s, chunk, buffer, (uint64_t)chunk * s->geometry.chunk_params, l);
    put_end(s, s->chunks[chunk].length, l.to);
}

const float *chunk_params_ahead(pyps_store *s, uint32_t chunk, uint32_t buffer) {
    struct look l;
    if (!look_at(s, chunk, buffer, &l)) return chunk_params(s, chunk, buffer);
    if (!has_scratch(s)) return NULL;
    l.to = s->chunk_floats;
    look_along(s, chunk, buffer, (uint64_t)chunk * s->geometry.chunk_params, l);
    return s->chunk_floats;
}

void chunk_look_run(const pyps_store *s, uint32_t chunk, uint32_t buffer, struct run run, float *to) {
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params, end = at + s->chunks[chunk].length;
    uint64_t used = run.first < end ? (run.end < end ? run.end : end) - run.first : 0;
    struct look l;
    memset(to + used, 0, (run.end - run.first - used) * sizeof *to);
    if (!look_at(s, chunk, buffer, &l)) {
        const float *from = buffer_params(s, chunk, buffer, (uint32_t)(run.first - at), used, to);
        if (from != to) memcpy(to, from, used * sizeof *to);
        return;
    }
    for (uint32_t vector = 1; vector <= s->layout.states; vector++) l.from[vector] += run.first - at;
    l.to = to, l.length = used;
    look_along(s, chunk, buffer, run.first, l);
}
