/* gradient.c: the gradient of a ticket, and the constants of its step, as the staging buffers have them. */
#include <math.h>
#include <string.h>

#include "store/gradients.h"

/* Read once from shared memory, where a hostile owner may change it. */
uint32_t staging_codec(const pyps_store *s, uint32_t slot, uint32_t staging) {
    uint32_t codec = *(volatile uint32_t *)&staging_header(s, slot, staging)->codec;
    return codec < STAGED_FORMS ? codec : PYPS_F32;
}

/* A block that is not finite as an encoder would send it: as zeros, or with zeros in it. A participant that applies a
 * chunk says so of a gradient that its owner has looked at, before the chunk's word does: falsely_looked reads it after
 * it has seen every word. */
static const float *mended(struct staging_header *header, uint32_t codec, const float *gradient,
                           size_t length, float *block) {
    if (kernels_chosen()->finite(gradient, length)) return gradient;
    if (codec == STAGED_LOOKED) store32_release(&header->false_look, 1); /* with load32_acquire below */
    for (size_t i = 0; i < length; i++)
        block[i] = codec == STAGED_ZERO && isfinite(gradient[i]) ? gradient[i] : 0;
    return block;
}

const float *staging_gradient(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec,
                              uint64_t at, size_t length, float *block) {
    if (codec == PYPS_F32) return staging_data(s, slot, staging) + at;
    if (codec >= CODECS)
        return mended(staging_header(s, slot, staging), codec, staging_data(s, slot, staging) + at, length,
                      block);
    kernels_chosen()->decode(codec, block, staging_codes(s, slot, staging) + codec_codes(codec, at),
                             staging_scales(s, slot, staging, codec) + codec_scales(codec, at), length);
    return block;
}

int falsely_looked(const pyps_store *s, uint32_t staging) {
    if (!load32_acquire(&staging_header(s, s->slot, staging)->false_look)) return PYPS_OK;
    return fail(
        PYPS_EFALSELOOK,
        "push: looked: it names a part of the gradient that has a value that is not finite; blocks with "
        "such values were taken as zeros");
}

/* The weighted mean of a round's gradients, sum(w_i g_i) / sum(w_i), for a run of `length` floats from `at` of the
 * flat vector, in rank order. It multiplies by the weights, whole numbers mostly, and divides once, which rounds least.
 * One of weight 0 may hold anything. */
static void reduce(const pyps_store *s, float *sum, uint64_t at, size_t length) {
    const struct kernels *kernels = kernels_chosen();
    bool summed = false;
    double weights = 0;
    for (uint32_t i = 0; i < s->source_count; i++) {
        const struct source *from = &s->sources[i];
        const struct staging_header *header = staging_header(s, from->slot, from->staging);
        double own = header->weight;
        weights += own;
        if (!(own > 0) || !staging_has(s, from->slot, from->staging, at)) continue;
        float block[BLOCK], scale = header->scale * from->scale;
        float weight = s->source_count == 1 ? scale : (float)own * scale;
        const float *gradient = staging_gradient(
            s, from->slot, from->staging, staging_codec(s, from->slot, from->staging), at, length, block);
        (summed ? kernels->multiply_add : kernels->multiply)(sum, gradient, weight, length);
        summed = true;
    }
    if (!summed) memset(sum, 0, length * sizeof *sum);
    else if (s->source_count > 1) kernels->divide(sum, (float)weights, length);
}

const float *ticket_gradient(const pyps_store *s, uint64_t at, size_t length, float *block) {
    uint32_t slot = s->ticket.slot, staging = s->ticket.staging; /* of a push */
    if (s->ticket.kind != TICKET_ROUND)
        return staging_gradient(s, slot, staging, staging_codec(s, slot, staging), at, length, block);
    reduce(s, block, at, length);
    return block;
}

/* Of a round, the gradient whose constants are the furthest in their schedule: a worker that began again must not
 * bring back the first ones. */
const struct staging_header *ticket_constants(const pyps_store *s) {
    const struct staging_header *lead = NULL;
    if (s->ticket.kind != TICKET_ROUND) return staging_header(s, s->ticket.slot, s->ticket.staging);
    for (uint32_t i = 0; i < s->source_count; i++) {
        const struct staging_header *staged = staging_header(s, s->sources[i].slot, s->sources[i].staging);
        if (!lead || staged->position > lead->position) lead = staged;
    }
    return lead;
}
