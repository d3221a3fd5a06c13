/* places.c: where chunk buffers, staging buffers and residuals are in the mapping, and the parts of each. */
#include "store/segment.h"

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

static uint8_t *staging_start(const pyps_store *s, uint32_t slot, uint32_t staging) {
    return s->base + s->layout.staging +
           ((uint64_t)slot * s->geometry.staging_buffers + staging) * s->layout.staging_stride;
}

struct staging_header *staging_header(const pyps_store *s, uint32_t slot, uint32_t staging) {
    return (struct staging_header *)(void *)staging_start(s, slot, staging);
}

float *staging_data(const pyps_store *s, uint32_t slot, uint32_t staging) {
    return (float *)(void *)(staging_start(s, slot, staging) + s->layout.staging_data);
}

uint8_t *staging_codes(const pyps_store *s, uint32_t slot, uint32_t staging) {
    return (uint8_t *)(void *)staging_header(s, slot, staging) + s->layout.staging_codes;
}

float *staging_scales(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec) {
    return (float *)(void *)(staging_codes(s, slot, staging) + codec_codes(codec, s->trained));
}

float *residual_at(const pyps_store *s, uint32_t name) {
    return (float *)(void *)(s->base + s->layout.residuals + (name - 1) * s->layout.residual_stride);
}
