/* staging.c: a worker's staging buffers: their memory, and giving them back unused.
 *
 * A staging buffer has room for a gradient, for codes and for ranges. Each part gets its memory
 * when it is first used, and only as much of it, so a worker that sends codes needs no more than these. A file
 * system that is full is an error of that call. A worker that leaves gives the memory back.
 */

#include "store/gradients.h"

static uint64_t offset_of(const pyps_store *s, const void *at) {
    return (uint64_t)((const uint8_t *)at - s->base);
}

int staging_allocate(pyps_store *s, uint32_t staging) {
    if (s->own_staging[staging].data_allocated) return PYPS_OK;
    int rc = segment_allocate(s, offset_of(s, staging_data(s, s->slot, staging)), 4 * store_elements(s));
    s->own_staging[staging].data_allocated = !rc;
    return rc;
}

int staging_allocate_codes(pyps_store *s, uint32_t staging, uint64_t bytes) {
    if (s->own_staging[staging].codes_allocated >= bytes) return PYPS_OK;
    int rc = segment_allocate(s, offset_of(s, staging_codes(s, s->slot, staging)), bytes);
    if (!rc) s->own_staging[staging].codes_allocated = bytes;
    return rc;
}

int staging_allocate_averaged(pyps_store *s, uint32_t staging) {
    uint64_t bytes = 4 * (store_elements(s) - s->trained);
    if (!bytes || s->own_staging[staging].data_allocated) return PYPS_OK;
    return segment_allocate(s, offset_of(s, staging_data(s, s->slot, staging) + s->trained), bytes);
}

void staging_give_back(pyps_store *s) {
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++) {
        uint64_t start = offset_of(s, staging_header(s, s->slot, staging));
        segment_release(s, start + s->layout.staging_data, s->layout.staging_stride - s->layout.staging_data);
    }
}

float *pyps_staging(pyps_store *s, uint32_t staging) {
    return staging_check(s, staging) || staging_allocate(s, staging) ? NULL
                                                                     : staging_data(s, s->slot, staging);
}

float *pyps_staging_range(pyps_store *s, uint32_t staging, pyps_range range) {
    if (staging_check(s, staging) || ranges_check(s, "staging_range", &range, 1)) return NULL;
    float *data = staging_data(s, s->slot, staging);
    return ranges_place(s, data, NULL, &range, 1) ? NULL : data + range.first;
}

void *pyps_staging_codes(pyps_store *s, uint32_t staging, uint64_t bytes) {
    if (staging_check(s, staging)) return NULL;
    uint64_t room = s->layout.staging_ranges - s->layout.staging_codes;
    if (bytes > room) {
        fail(PYPS_EINVAL, "staging_codes: bytes: found %lu; expected at most %lu", bytes, room);
        return NULL;
    }
    return staging_allocate_codes(s, staging, bytes) ? NULL : staging_codes(s, s->slot, staging);
}

int staging_check(pyps_store *s, uint32_t staging) {
    int rc = store_check_worker(s);
    return rc || staging < s->geometry.staging_buffers
               ? rc
               : fail(PYPS_EINVAL, "staging: found %u; expected below %u", staging,
                      s->geometry.staging_buffers);
}

/* A push that timed out in a round stays there until the round closes; no call waits for it any more. */
void staging_park(pyps_store *s) {
    if (s->round.pending) s->parked |= 1u << s->round.staging;
    s->round.pending = false;
}

void staging_abandon(pyps_store *s) {
    s->own.ticket = 0; /* a gradient given up may lie there in part */
    staging_park(s);
    for (uint32_t staging = 0; staging < s->geometry.staging_buffers; staging++)
        s->own_staging[staging].taken = s->parked >> staging & 1;
}

int pyps_unstage(pyps_store *s, uint32_t staging) {
    int rc = staging_check(s, staging);
    if (rc) return rc;
    bool waits = (s->round.pending && staging == s->round.staging) || s->parked >> staging & 1;
    if (!s->own_staging[staging].taken || waits)
        return fail(PYPS_EINVAL, "unstage: staging: found %u; expected one that pyps_stage returned%s",
                    staging, waits ? ", and that waits in no round" : "");
    s->own_staging[staging].taken = false;
    if (staging == s->own.staging) s->own.ticket = 0;
    return PYPS_OK;
}

int residual_allocate(pyps_store *s, uint32_t name) {
    return segment_allocate(s, s->layout.residuals + (name - 1) * s->layout.residual_stride,
                            s->layout.residual_stride);
}
