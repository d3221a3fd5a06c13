/* layout.c: from geometry to offsets, refusing what would not fit the packed words. */
#include "store/layout.h"

#include "error.h"
#include "kernels/kernels.h"
#include "policy/policy.h"
#include "store/words.h"

#define PAGE            4096u
#define FLOATS_OF_RANGE 16u /* a gradient of shorter ranges than these may have too many */

static uint64_t round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }

static int check(const struct geometry *g) {
    const struct {
        const char *field;
        uint64_t found, low, high;
    } fields[] = {
        {"chunk_params", g->chunk_params, 1024, 1u << 24},
        {"chunks", g->chunks, 1, OWNER_CHUNK_NONE - 1},
        {"max_participants", g->max_participants, 1, MAX_PARTICIPANTS},
        {"snapshot_spares", g->snapshot_spares, 1, 1u << 20},
        {"staging_buffers", g->staging_buffers, 1, MAX_STAGING_BUFFERS},
        {"optimizer", g->optimizer, PYPS_SGD, PYPS_ADAGRAD},
        {"master", g->master, PYPS_F32, PYPS_BF16},
        {"averaged", g->averaged, 0, 1},
        {"ranks", g->ranks, 1, g->max_participants},
        {"groups", g->groups, 1, 4096},
        {"tensors", g->tensors, 1, 1u << 20},
        {"round_timeout_nanoseconds", g->round_timeout_nanoseconds, 1000000, UINT64_MAX / 4},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        int rc = pyps__between(fields[i].field, fields[i].found, fields[i].low, fields[i].high);
        if (rc) return rc;
    }
    int rc = policy_check(g->policy, &g->policy_params);
    if (rc) return rc;
    if (g->chunk_params % 1024)
        return fail(PYPS_EINVAL, "chunk_params: found %u; expected a multiple of 1024", g->chunk_params);
    return PYPS_OK;
}

int layout_compute(const struct geometry *g, struct layout *l) {
    int rc = check(g);
    if (rc) return rc;
    l->states = kernels_states(g->optimizer);
    l->common_buffers = g->chunks + g->snapshot_spares;
    l->buffer_count = l->common_buffers + SPARES_A_SLOT * g->max_participants;
    l->view_count = 2 * g->max_participants + 2;
    l->views_allocated = l->view_count < VIEWS_ALLOCATED ? l->view_count : VIEWS_ALLOCATED;
    if (l->buffer_count > WORD_BUFFER_MASK)
        return fail(PYPS_EINVAL, "chunks: found %u; too many for 24-bit buffer indices", g->chunks);

    uint64_t floats = 4 * (uint64_t)g->chunk_params;
    l->buffer_states = g->master == PYPS_BF16 ? floats / 2 : floats;
    uint64_t buffer = l->buffer_states + l->states * floats;
    if (g->averaged && buffer < floats) buffer = floats; /* averaged chunks are floats, and have no states */
    /* An odd number of cache lines. Buffers a power of two apart would compete for the same cache sets, and a
     * load from one would seem to depend on a store to another (both compare the low 12 address bits). */
    l->buffer_stride = round_up(sizeof(struct chunk_header) + buffer, PAGE) + 5 * 64;
    l->view_stride = round_up(view_bytes(g->max_participants, g->staging_buffers), 64);
    l->staging_sums = round_up(sizeof(struct staging_header) + g->groups * sizeof(pyps_hyper), 64);
    l->staging_data = l->staging_sums + round_up(8 * (uint64_t)g->chunks, 64) + 3 * 64;
    uint64_t flat = (uint64_t)g->chunks * g->chunk_params;
    l->staging_codes = round_up(l->staging_data + 4 * flat, PAGE);
    l->staging_ranges = l->staging_codes + round_up(2 * flat, PAGE); /* halves are the longest codes */
    l->most_ranges = flat / FLOATS_OF_RANGE;
    l->staging_stride = l->staging_ranges + round_up(l->most_ranges * sizeof(pyps_range), PAGE);
    l->residual_stride = round_up(4 * flat, PAGE) + 5 * 64;

    uint64_t at = PAGE;
    l->tensors = at, at += round_up(g->tensors * (uint64_t)sizeof(pyps_tensor), 64);
    l->groups = at, at += round_up(g->groups * (uint64_t)sizeof(struct group), 64);
    l->slots = at, at += g->max_participants * (uint64_t)sizeof(struct slot);
    l->words = at, at += round_up(8 * (uint64_t)g->chunks, 64);
    l->saved = at, at += round_up(8 * (uint64_t)g->chunks, 64);
    l->owners = at, at += round_up(8 * (uint64_t)l->buffer_count, 64);
    l->view_owners = at, at += round_up(8 * (uint64_t)l->view_count, 64);
    l->views = at, at += l->view_count * l->view_stride;
    l->buffers = at = round_up(at, PAGE), at += l->buffer_count * l->buffer_stride;
    l->staging = at = round_up(at, PAGE),
    at += (uint64_t)g->max_participants * g->staging_buffers * l->staging_stride;
    l->residuals = at, at += RESIDUALS_A_SLOT * (uint64_t)g->max_participants * l->residual_stride;
    l->bytes = at;
    if (at > (uint64_t)1 << 46)
        return fail(PYPS_EINVAL, "chunks: found %u; the segment would pass 64 TiB", g->chunks);
    return PYPS_OK;
}

uint32_t layout_crc32(const void *data, size_t bytes, uint32_t seed) {
    const unsigned char *p = data;
    uint32_t crc = ~seed;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (UINT32_C(0xEDB88320) & -(crc & 1));
    }
    return ~crc;
}
